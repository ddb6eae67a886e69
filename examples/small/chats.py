"""Writes chats as JSON lines: a question about each documented function of Python's standard library, and the answer.

python examples/small/chats.py chat.jsonl
"""

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    *("os", "math", "json", "random", "shutil", "textwrap", "statistics", "inspect", "ast", "difflib", "calendar"),
    *("asyncio", "collections", "contextlib", "csv", "datetime", "decimal", "email", "fractions", "functools", "glob"),
    *(
        "heapq",
        "hashlib",
        "html",
        "http",
        "itertools",
        "logging",
        "operator",
        "pathlib",
        "pickle",
        "platform",
        "pprint",
    ),
    *("re", "sched", "shlex", "socket", "sqlite3", "ssl", "string", "struct", "subprocess", "tarfile", "tempfile"),
    *(
        "threading",
        "timeit",
        "tokenize",
        "traceback",
        "types",
        "unittest",
        "urllib.parse",
        "uuid",
        "warnings",
        "zipfile",
    ),
)


def chats() -> Iterator[dict[str, list[dict[str, str]]]]:
    """One conversation for each public function or class that has a docstring."""
    for module in map(importlib.import_module, MODULES):
        for name, value in sorted(vars(module).items()):
            about = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
            if about:
                question = {"role": "user", "content": f"What does {module.__name__}.{name} do?"}
                yield {"messages": [question, {"role": "assistant", "content": about.splitlines()[0]}]}


def main(path: Path) -> None:
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What the API reference shows where the sources alone do not tell it. Loaded by mkdocstrings (mkdocs.yml).

Functions decorated with ``takes`` or ``model_and`` get the keyword arguments of their dataclass, as ``help`` shows
them. Rows of tables that go on in the next line become one, as Markdown wants them.
"""

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from typing import Any

import griffe

from penstock.config.meanings import joined_rows

_DECORATORS = {"penstock.config.meanings.takes", "penstock.config.meanings.model_and"}


class Signatures(griffe.Extension):  # type: ignore[misc]
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any(decorator.callable_path in _DECORATORS for decorator in func.decorators):
            return
        if func.docstring is None:  # a method, which shows its class's
            return
        # In a process of its own: what planning imports ends a program that imports it in a thread of Rust's.
        words = [sys.executable, __file__, func.module.path, func.name]
        told = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        func.docstring.value = told["docstring"]
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    name,
                    annotation=annotation,
                    kind=griffe.ParameterKind[kind.lower()],
                    default=default,
                )
                for name, kind, annotation, default in told["parameters"]
            )
        )

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(joined_rows(obj.docstring.value))


def tell(module: str, name: str) -> dict[str, Any]:
    """A function's docstring, and its parameters: name, kind, annotation, default."""
    function = getattr(import_module(module), name)
    empty = inspect.Parameter.empty
    return {
        "docstring": inspect.getdoc(function),
        "parameters": [
            (
                p.name,
                p.kind.name,
                re.sub(r"\b(?:[a-z_]\w*\.)+", "", inspect.formatannotation(p.annotation)),
                None if p.default is empty else repr(p.default),
            )
            for p in inspect.signature(function).parameters.values()
        ],
    }


if __name__ == "__main__":
    print(json.dumps(tell(*sys.argv[1:])))

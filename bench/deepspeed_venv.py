"""DeepSpeed in a virtual environment of its own, made when it is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.harness import ROOT, BenchError, Side

VERSION = "0.19.8"
VARIABLE = "PENSTOCK_BENCH_DEEPSPEED"
DEFAULT = ROOT / ".bench" / "deepspeed"
_TORCH = "torch==2.13.0"
_TRANSFORMERS = "transformers==5.23.0"
_INSTALLS = (
    (_TORCH, "numpy", "wheel", "ninja", "setuptools", "packaging"),
    ("--no-build-isolation", f"deepspeed=={VERSION}"),
    (_TORCH, _TRANSFORMERS, "safetensors"),
)


def default_place() -> Path:
    """Where the environment is: ``$PENSTOCK_BENCH_DEEPSPEED``, else ``.bench/deepspeed`` in the repository."""
    return Path(os.environ.get(VARIABLE, DEFAULT))


def prepare(place: Path) -> Path:
    """Make the environment at ``place`` unless it is complete; returns its Python.

    Raises:
        BenchError: what DeepSpeed compiles with is missing, or an installation failed.
    """
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    missing += [] if Path("/usr/include/libaio.h").exists() else ["libaio.h"]
    if missing:
        raise BenchError(
            f"DeepSpeed compiles its parts at its first start and needs {', '.join(missing)}: "
            "apt-get install g++ ninja-build libaio-dev"
        )
    python, complete = place / "bin" / "python", place / "complete"
    if complete.exists() and complete.read_text() == VERSION:
        return python
    print(f"making an environment for DeepSpeed {VERSION} in {place} (once, some minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    for packages in _INSTALLS:
        try:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        except subprocess.CalledProcessError as error:
            raise BenchError(f"pip install {' '.join(packages)} failed in {place}; see above") from error
    complete.write_text(VERSION)
    return python


def environment(python: Path) -> dict[str, str]:
    """What DeepSpeed's processes need in their environment. ``python``: of ``prepare``."""
    return {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(python.absolute().parent.parent / "extensions"),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }


def side(place: Path, *flags: str) -> Side:
    """DeepSpeed's side, with ``flags`` for ``bench.peer_deepspeed``. Its first start compiles for minutes."""
    python = prepare(place)
    return Side(
        name="deepspeed",
        command=(str(python), "-m", "bench.peer_deepspeed", *flags),
        environment=environment(python),
    )

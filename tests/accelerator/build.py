"""The backend's library, compiled once for each content of its sources and each version of torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "device"
KEPT = Path(__file__).parents[2] / "build" / "accelerator"

_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden")


def compiler() -> str | None:
    """The C++ compiler; None if there is none."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def library() -> Path:
    """The library, which is compiled if it is not kept. Takes a quarter of a minute then."""
    digest = hashlib.sha256("\n".join((torch.__version__, *_FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    made = KEPT / f"sim-{digest.hexdigest()[:16]}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(KEPT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one compiles, and the others find it
        if not made.exists():
            for old in KEPT.glob("sim-*.so"):
                old.unlink()
            _compile(made)
    return made


def _compile(made: Path) -> None:
    from torch.utils import cpp_extension  # it imports setuptools: a tenth of a second, of every process of the tests

    found = compiler()
    assert found is not None
    partial = made.with_suffix(".partial")
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(
        [found, *_FLAGS, *includes, str(SOURCES / "device.cpp"), "-o", str(partial), *libraries],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    partial.rename(made)

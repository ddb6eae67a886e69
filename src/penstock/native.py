"""Loads the package's native libraries, which CMake builds beside the modules that call them."""

import ctypes
from pathlib import Path

HOW_TO_BUILD = "pip install -e . builds it (needs a C++17 compiler), and says what fails with --verbose"


def load(path: Path, abi: int) -> ctypes.CDLL:
    """The library, whose ``penstock_abi()`` has to be ``abi``. Calls through it release the GIL.

    Raises:
        OSError: there is none, it cannot be loaded, or it is another version's.
    """
    if not path.exists():
        raise OSError(f"the native library {path} is not built")
    library = ctypes.CDLL(str(path))
    found = library.penstock_abi() if hasattr(library, "penstock_abi") else 0
    if found != abi:
        raise OSError(f"{path} was built from another version (interface {found}, not {abi})")
    return library

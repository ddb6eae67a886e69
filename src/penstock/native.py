"""The package's native libraries, which CMake builds beside the modules that call them."""

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

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


def address(buffer: memoryview | npt.NDArray[np.generic]) -> int:
    """The first byte of a contiguous buffer, which the caller keeps alive; 0 if it is empty."""
    if not buffer.nbytes:
        return 0
    view = buffer if isinstance(buffer, memoryview) else buffer.data
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)  # ctypes takes none that is, and is ten times as fast
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

"""The native library compiled for aarch64 gives the bits of this machine's.

It takes a cross compiler and an emulator (Debian and Ubuntu: g++-aarch64-linux-gnu, qemu-user-static), so it is a part
of ``make wheel``.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.optim import library
from tests.accelerator import build

SOURCE = Path(__file__).parent / "native" / "every_kernel.cpp"
ROOT = Path(__file__).parents[2]
CROSS = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")


def configured(folder: Path, *options: str) -> Path:
    """The library, built by the project's own CMakeLists.txt."""
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, "-DSKBUILD_STATE=wheel", *options], check=True)
    subprocess.run(["cmake", "--build", folder], check=True)
    return folder / "_kernels.so"


def program(compiler: str, kernels: Path) -> Path:
    """Calls all of the library's functions and prints checksums of what they make."""
    made = kernels.with_name("every_kernel")
    include = f"-I{ROOT / 'src' / 'penstock' / 'optim' / 'native'}"
    subprocess.run([compiler, "-std=c++17", "-O1", include, SOURCE, kernels, "-o", made], check=True)
    return made


def checksums(*words: str | Path) -> list[str]:
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.mark.campaign
def test_every_kernel_has_the_same_bits_on_aarch64(tmp_path: Path) -> None:
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    own = build.compiler()
    if shutil.which(CROSS) is None or emulator is None or own is None or shutil.which("cmake") is None:
        pytest.skip(f"needs CMake, a C++ compiler, {CROSS} and {' or '.join(EMULATORS)}")
    here = program(own, configured(tmp_path / "here"))
    cross = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}")
    there = program(CROSS, configured(tmp_path / "there", *cross))
    expected = checksums(here, "0")
    assert len(expected) > 1000
    for level in range(1, len(library.levels())):
        assert checksums(here, str(level)) == expected
    assert checksums(emulator, "-L", f"/usr/{CROSS.removesuffix('-g++')}", there) == expected

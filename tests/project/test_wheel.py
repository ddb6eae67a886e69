"""A wheel needs no compiler, no particular Python and no particular torch, and all that trains is in it."""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from penstock.optim import library
from penstock.sim import library as simulator
from penstock.store import kernel
from tests import two_steps
from tests.documented import ROOT
from tests.runs import write_run

LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
OF_THE_SYSTEM = LOADERS | {"libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"}
"""Libraries that manylinux lets a wheel ask for, and that the native libraries may."""
NATIVE = (Path(library.__file__).with_name("_kernels.so"), kernel.PATH, simulator.PATH)


def test_what_a_wheel_is_tried_with_trains(capsys: pytest.CaptureFixture[str]) -> None:
    two_steps.main()
    assert library.levels()[-1] in capsys.readouterr().out


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: path.name)
def test_the_native_libraries_ask_for_no_library_of_python_or_torch(path: Path) -> None:
    """That is why one wheel serves every Python and every torch."""
    said = subprocess.run(["readelf", "--dynamic", path], capture_output=True, text=True, check=True).stdout
    asked = set(re.findall(r"\(NEEDED\).*\[(.+)\]", said))
    assert "libc.so.6" in asked
    assert asked <= OF_THE_SYSTEM


def test_every_place_names_the_same_version() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == wanted
    newest = re.search(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == wanted


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the sdist, as pip makes it where there is no wheel."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.campaign
def test_a_wheel_is_for_every_python_and_has_the_package_whole(wheel: Path) -> None:
    assert re.fullmatch(r"penstock-[0-9.]+-py3-none-(many)?linux\w+\.whl", wheel.name)
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("penstock/")}
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    native = ("penstock/optim/native/", "penstock/store/native/", "penstock/sim/native/")
    sources = {name.removeprefix("src/") for name in listed.splitlines()}
    built = {"penstock/optim/_kernels.so", "penstock/store/_transfer.so", "penstock/sim/_simulate.so"}
    assert inside == {name for name in sources if not name.startswith(native)} | built


@pytest.mark.campaign
def test_a_wheel_installs_and_trains_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "TMP"))}
    environment = {**kept, "PATH": str(bare / "bin"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def done(*words: str | Path) -> str:
        finished = subprocess.run(
            words,
            cwd=tmp_path,
            env=environment,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert finished.returncode == 0, finished.stdout
        return finished.stdout

    python = bare / "bin" / "python"
    packages = ("-c", ROOT / "constraints.txt", f"penstock[hf] @ {wheel.as_uri()}")
    done(python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *packages)
    assert str(bare) in done(python, ROOT / "tests" / "two_steps.py")
    said = done(bare / "bin" / "penstock", "train", write_run(tmp_path), "--steps", "2")
    assert "plain torch" not in said
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2], said

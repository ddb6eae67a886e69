"""Fixtures that several files of tests share."""

import gc
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.cluster import Cluster
from hypothesis import HealthCheck, settings

from bench import cluster
from penstock.shape.huggingface import HuggingFaceModel
from penstock.shape.model import ModelProfile
from tests import sampling, small_examples
from tests.accelerator.elsewhere import PREFIX, pytest_runtest_protocol, pytest_runtest_setup
from tests.faults import calls_can_be_replaced
from tests.runs import write_run

gc.disable()  # until all tests are collected: what is imported stays, and to look through it takes a third of the time

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when it is first imported: nothing is looked up, or reported
# Two tests run at a time, on two cores; models are small, and threads that wait for each other only take time.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# How long an example takes says nothing where other processes have the cores; what must be soon says how soon.
settings.register_profile("busy", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

calls_can_be_replaced()

__all__ = ["pytest_runtest_protocol", "pytest_runtest_setup"]  # of tests that need an accelerator

_PROFILES: dict[str, ModelProfile] = {}
_SHIFTS: dict[tuple[type, str], bool | None] = {}
FINDINGS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--campaign", action="store_true", help="as many faults as docs/reliability.md says; whole products"
    )


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """How many cases of a fault to make, and where to say what came of them."""

    full: bool
    findings: list[str]

    def cases(self, few: int, many: int) -> int:
        return many if self.full else few

    def found(self, line: str) -> None:
        """For the end of pytest's output."""
        self.findings.append(line)


@pytest.fixture
def campaign(pytestconfig: pytest.Config) -> Campaign:
    findings = pytestconfig.stash.setdefault(FINDINGS, [])
    return Campaign(full=pytestconfig.getoption("--campaign"), findings=findings)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:  # of two processes, each would have a test of another name
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: give its parameters ids without addresses")
    if not config.getoption("--campaign"):
        items[:], left_out = sampling.chosen(items)
        config.hook.pytest_deselected(items=left_out)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--campaign") and FINDINGS in config.stash:
        terminalreporter.section("faults")
        for line in config.stash[FINDINGS]:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True, scope="module")
def modules_stay() -> Iterator[None]:
    """What is alive when a file of tests begins and ends (torch, transformers and all else that is imported) is not
    looked through for garbage again: that took a fifth of all time."""
    gc.collect()
    gc.freeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_works() -> None:
    """A shell starts its background jobs with Ctrl-C ignored, which processes that tests start would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; processes that tests start inherit it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def no_stored_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What has been measured on this machine must not decide how a test runs, nor be replaced by one. Nor is it
    measured for each engine that has no profile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PENSTOCK_MEASURE", "never")
        yield


@pytest.fixture(autouse=True)
def later_tests_measure_nothing(no_stored_profiles: None) -> Iterator[None]:
    """A test that takes the switch out of the environment puts it back, and one that measures has a folder of its own
    for the profile: with one, each engine that is opened later would time its stages and search for a plan."""
    yield
    assert os.environ.get("PENSTOCK_MEASURE") == "never"
    left = [*Path(os.environ["XDG_CACHE_HOME"], "penstock").rglob("*.json")]
    for path in left:  # for the next test's sake
        path.unlink()
    assert not left


@pytest.fixture(autouse=True, scope="session")
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What tests, and the processes that they start, put into the system's temporary folder."""
    multiprocessing.util.get_temp_dir()  # Python's own, which it removes when it ends: later than pytest its own
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("system")
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)  # it is looked up once
        yield folder


@pytest.fixture(autouse=True)
def nothing_is_left_behind(own_temporary_folder: Path) -> Iterator[None]:
    """A run that leaves files in the system's temporary folder fills it in the end."""
    yield
    left = [path.name for path in own_temporary_folder.iterdir() if not path.name.startswith(_STAYS)]
    for name in left:  # for the next test's sake
        shutil.rmtree(own_temporary_folder / name, ignore_errors=True)
    assert not left, "in the system's temporary folder"


_STAYS = ("wandb-", "playwright", "org.chromium.", ".org.chromium.", "torchinductor_", PREFIX)
"""What is gone when its process ends: wandb's service, and the browser of a whole file of tests. And what torch has
compiled, for the next who asks for it."""


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models are faster on one thread, and sums then do not depend on the machine. Of a whole file, with what its
    tests share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def deterministic() -> Iterator[None]:
    """torch insists on kernels that compute the same bits in every run: a GPU's faster ones do not."""
    from penstock.cli.deterministic import deterministic_kernels

    with deterministic_kernels(True):
        yield


@pytest.fixture
def one_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for a plan simulates the first of its proposals and takes it, where it would try others for half of its
    time: for tests to which any plan will do that fits."""
    monkeypatch.setattr("penstock.planner.search.SIMULATIONS", 1)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, one_simulation: None) -> None:
    """Other batches are not weighed, nor what would help, which takes most of a plan's time: for tests that look at
    neither, and to which any plan will do."""
    monkeypatch.setattr("penstock.planner.ask.PlanReport.curve", ())
    monkeypatch.setattr("penstock.planner.ask.PlanReport.advice", ())


@pytest.fixture(scope="module")
def each_model_is_looked_at_once() -> Iterator[None]:
    """Commands start with the same few models again and again, in micro-batches of the same sizes. What runs of these
    without weights find, which takes a quarter of such a start, is the subject of ``tests/shape`` and ``tests/hf``."""
    from penstock.cli import model as cli_model

    profile, shifts = HuggingFaceModel.profile, cli_model.shifts

    def profile_once(shape: HuggingFaceModel, *asked: Any) -> ModelProfile:
        if shape.change is not None:  # two may look alike
            return profile(shape, *asked)
        key = repr((shape, asked))
        if key not in _PROFILES:
            _PROFILES[key] = profile(shape, *asked)
        return _PROFILES[key]

    def shifts_once(built: Any) -> bool | None:
        key = (type(built), built.config.to_json_string())
        if key not in _SHIFTS:
            _SHIFTS[key] = shifts(built)
        return _SHIFTS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceModel, "profile", profile_once)
        patch.setattr(cli_model, "shifts", shifts_once)
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted ext4 file system of 16 MiB in a file; skips where this process may not mount."""
    image, mount = tmp_path / "disk.img", tmp_path / "disk"
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("a small file system needs root and mkfs.ext4")
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts that have a network; skips where this process can make none."""
    why = cluster.why_none()
    if why is not None:
        assert os.environ.get("CI") != "true" or os.geteuid(), why
        pytest.skip(f"several hosts: {why}")
    with Cluster(2, tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that examples/small/scratch.sh has made: ``llama`` in it is a model from nothing, exported."""
    made = tmp_path_factory.mktemp("small")
    written = small_examples.run("scratch.sh", made, *small_examples.SMALL).splitlines()[-1]
    assert written.startswith("def main("), "the exported model writes, in transformers"
    return made


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that ``penstock train`` has made of three steps, with its store in it. Copy it; it is shared."""
    from penstock.cli import main

    made = tmp_path_factory.mktemp("finished")
    config = write_run(made)
    assert main(["train", str(config), "--steps", "3"]) == 0
    return made / "run"


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run of four steps, that nobody stopped: what a run that was has to come to. It is shared, and read."""
    from penstock.cli import main

    made = tmp_path_factory.mktemp("whole")
    assert main(["train", str(write_run(made))]) == 0
    return made / "run"


@pytest.fixture
def a_run(finished_run: Path, tmp_path: Path) -> Path:
    """A run of three steps of one's own."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def for_all(tmp_path: Path) -> Iterator[Path]:
    """A folder that another user may look into. Pytest's own are their owner's alone, are shared by tests that run at
    the same time, and are closed again by each run of pytest that begins."""
    if os.geteuid():  # who is not root tests as the user that he is
        yield tmp_path
        return
    closed = next((path for path in reversed(tmp_path.parents) if not path.stat().st_mode & 0o001), tmp_path)
    with tempfile.TemporaryDirectory(dir=closed.parent) as made:
        os.chmod(made, 0o755)
        yield Path(made)

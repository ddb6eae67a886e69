"""Fixtures that several files of tests share."""

import signal
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_works() -> None:
    """A shell starts its background jobs with Ctrl-C ignored, which processes that tests start would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_stored_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What has been measured on this machine must not decide how a test runs, nor be replaced by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models are faster on one thread, and sums then do not depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""Saved activations leave and come back while another thread may read them, which sees them whole or not at all."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from penstock.tape.let_go import LetGoError
from penstock.tape.saved_activations import SavedActivations


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_what_leaves_and_comes_back_reads_as_its_own_values_or_not_at_all() -> None:
    tensor, saved = torch.ones(2, 3), SavedActivations()
    saved.note(0, 0, [tensor])
    seen, ended = set[object](), threading.Event()

    def read() -> None:
        while not ended.is_set():
            try:
                seen.add(tensor.tolist()[0][0])
            except LetGoError:
                seen.add("away")

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2000):
        saved.drop(0, 0)
        saved.restore(0, 0, [torch.ones(2, 3)])
    ended.set()
    reader.join()
    assert seen == {1.0, "away"}

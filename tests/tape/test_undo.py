"""What takes back the temporary changes of calls."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from penstock.compat.torch import without_functions
from penstock.tape.undo import Undo


class Sees(TorchFunctionMode):
    """Notes the names of functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_functions_of_torch_are_seen_after_a_with_that_an_interrupt_has_left_unended() -> None:
    unended = without_functions()

    def break_off() -> None:
        unended.__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Undo().after(list):
        break_off()
    with Sees() as sees:
        torch.zeros(1).add(1)
    assert "add" in sees.names


def test_what_could_not_be_taken_back_is_tried_again() -> None:
    undo, tried = Undo(), list[str]()

    def fails_once() -> None:
        tried.append("inner")
        if len(tried) == 1:
            raise MemoryError

    with pytest.raises(MemoryError), undo.after(lambda: tried.append("outer")), undo.after(fails_once):
        pass
    assert tried == ["inner", "inner", "outer"]
    undo.all()
    assert len(tried) == 3, "nothing is left"

"""The bytes that ops move, by hand: a probe and a dry run count them by the same rule, and would be wrong together."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.tape.watch import Operand, Watch

A, B, SQUARE, ROWS = torch.ones(1024), torch.ones(1024), torch.ones(64, 64), torch.ones(8, 64)
PLACES = torch.arange(8)
INDICES = 8 * 8  # bytes
LOGITS, LABELS = torch.zeros(16, 100, requires_grad=True), torch.zeros(16, dtype=torch.long)


def nll() -> None:
    chances = LOGITS * 2  # reads and writes
    torch.nn.functional.nll_loss(chances, LABELS).backward()


OPS: dict[str, tuple[Callable[[], object], int]] = {
    "reads two, writes one": (lambda: A + B, 3 * 4096),
    "in place": (lambda: A.add_(B), 3 * 4096),
    "by a number": (lambda: A * 2.0, 2 * 4096),
    "a copy": (lambda: A.copy_(B), 2 * 4096),
    "a cast": (lambda: A.bfloat16(), 4096 + 2048),
    "a view": (lambda: SQUARE.t()[3:], 0),
    "of an expanded row": (lambda: SQUARE[:1].expand(64, 64).contiguous(), 256 + 16384),
    "memory as it is": (lambda: torch.empty(1024), 0),
    "zeros": (lambda: torch.zeros_like(A), 4096),
    "filled": (lambda: A.fill_(1.0), 4096),
    "some rows": (lambda: SQUARE[PLACES], 2 * 2048),
    "added to some rows": (lambda: SQUARE.index_add(0, PLACES, ROWS), 2 * 16384 + 2048 + INDICES),
    "added to some rows in place": (lambda: SQUARE.index_add_(0, PLACES, ROWS), 3 * 2048),
    "a product": (lambda: SQUARE @ SQUARE, 0),
    # the loss's gradient is written, read, and the other factor's with it
    "the loss of a label each": (nll, 2 * 6400 + 6400 + 2 * 6400),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_moves_what_it_reads_and_writes(name: str) -> None:
    do, wanted = OPS[name]
    watch = Watch({}, lambda group: None)
    with watch:
        do()
    assert watch.work.traffic == wanted
    assert (watch.work.flops > 0) == (name == "a product")


WIDE, PAIRS = torch.ones(64, 3), torch.ones(2, 8, 64)
PRODUCTS: dict[str, Callable[[], object]] = {
    "of matrices": lambda: ROWS @ WIDE,
    "of pairs": lambda: PAIRS @ WIDE.expand(2, 64, 3),
    "added to a row": lambda: torch.addmm(WIDE[0], ROWS, WIDE, beta=0.5),
    "added to pairs": lambda: torch.baddbmm(WIDE[0], PAIRS, WIDE.expand(2, 64, 3), alpha=2.0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_the_flop_that_torch_counts(name: str) -> None:
    with (watch := Watch({}, lambda group: None)):
        PRODUCTS[name]()
    with (counter := FlopCounterMode(display=False)):
        PRODUCTS[name]()
    assert watch.work.flops == counter.get_total_flops() > 0


def test_an_op_that_is_defined_anew_writes_to_what_it_says_now() -> None:
    name, x = "penstock_tests::anew", torch.ones(2)

    def changes(x: torch.Tensor) -> None:
        x.add_(1)

    def makes(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for turn in range(60):
        written: list[Operand] = []
        if turn % 2:
            op = torch.library.custom_op(name, changes, mutates_args=("x",))
        else:
            op = torch.library.custom_op(name, makes, mutates_args=())
        with Watch({}, lambda group: None, written.append):
            op(x)
        assert len(written) == turn % 2, turn

"""Messages between ranks of a pipeline: a tensor arrives as it was, with its head or behind it."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.errors import NonFiniteError
from penstock.runtime.actions.crossing import Crossing
from penstock.runtime.streams import HostStreams
from penstock.schedule.ir.ops import Op
from penstock.schedule.ir.references import stage_op
from penstock.tape.handed import Kind

MiB = 1 << 20


class Line:
    """Ranks that receive what they send."""

    def number_of(self, rank: int) -> int:
        return rank

    def __init__(self) -> None:
        self.messages: deque[torch.Tensor] = deque()
        self.sent: list[int] = []

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self.messages.append(tensor.clone())
        self.sent.append(tensor.numel())

    def receive(self, into: torch.Tensor, peer: int) -> None:
        into.copy_(self.messages.popleft())


class Elsewhere:
    """What is to be sent, and what has come."""

    def __init__(self, tensor: torch.Tensor | None, kind: Kind) -> None:
        self.tensor, self._kind = tensor, kind

    def take(self, *_: object) -> torch.Tensor | None:
        return self.tensor

    def kind(self, *_: object) -> Kind:
        return self._kind

    def put(self, _way: str, _stage: int, _mb: int, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor


def crossed(
    tensor: torch.Tensor | None, probed: torch.Tensor, failure: NonFiniteError | None = None
) -> tuple[torch.Tensor | None, list[int], list[Any]]:
    """A gradient as it comes out; the bytes of the messages; and both ends."""
    line, ends = Line(), []
    elsewhere = Elsewhere(tensor, Kind.of(probed))
    for kind, failed in (("SD", failure), ("RD", None)):
        context = SimpleNamespace(failure=failed, step=3)
        access: Any = SimpleNamespace(context=context, moved=0, arrays=SimpleNamespace(device=torch.device("cpu")))
        tape: Any = SimpleNamespace(elsewhere=elsewhere)
        ranks: Any = line
        Crossing(access, tape, ranks, HostStreams(), None).kinds()[kind](Op(id=stage_op(kind, 1, 0), peer=1))
        ends.append(access)
    assert not line.messages
    return elsewhere.tensor, line.sent, ends


TENSORS = {
    "small": torch.randn(3, 5, 7),
    "turned": torch.randn(4, 6).T,
    "with gaps": torch.randn(8, 8)[:, :5],
    "bf16": torch.randn(9).bfloat16(),
    "whole numbers": torch.arange(6).view(2, 3),
    "empty": torch.empty(2, 0),
    "no dimension": torch.tensor(1.5),
    "large": torch.randn(MiB),
}


@pytest.mark.parametrize("what", TENSORS)
@pytest.mark.parametrize("as_probed", [True, False])
def test_a_tensor_arrives_with_its_values_and_strides(what: str, as_probed: bool) -> None:
    sent = TENSORS[what]
    probed = sent if as_probed else torch.empty(11, dtype=sent.dtype)
    got, messages, ends = crossed(sent, probed)
    assert got is not None
    assert torch.equal(got, sent)
    assert (got.stride(), got.dtype) == (sent.stride(), sent.dtype)
    assert [end.moved for end in ends] == [Kind.of(sent).nbytes] * 2
    assert len(messages) == (1 if as_probed and what != "large" else 2)


def test_no_gradient_is_none_and_a_failure_goes_along() -> None:
    got, messages, (_, there) = crossed(None, TENSORS["small"], NonFiniteError("inf"))
    assert got is None
    assert len(messages) == 1
    assert "a loss of rank 0 is infinite or NaN" in str(there.context.failure)

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


class Besides:
    """What a stage is handed besides its input: tensors, and the kinds that the probe has seen in their places."""

    def __init__(self, tensors: list[torch.Tensor], probed: list[torch.Tensor]) -> None:
        self._tensors, self._kinds = tensors, [Kind.of(tensor) for tensor in probed]
        self.come: dict[int, torch.Tensor] = {}

    def kinds_besides(self, _stage: int, _mb: int) -> list[tuple[int, Kind]]:
        return list(enumerate(self._kinds))

    def shared(self, _mb: int, number: int) -> torch.Tensor:
        return self._tensors[number]

    def share(self, _mb: int, number: int, tensor: torch.Tensor) -> None:
        self.come[number] = tensor

    def require_as_they_were(self, *_: object) -> None:
        pass


def cross(elsewhere: Any, kinds: tuple[str, str], failure: NonFiniteError | None = None) -> tuple[list[int], list[Any]]:
    """Send, and receive: the bytes of the messages, and both ends."""
    line, ends = Line(), []
    for kind, failed in zip(kinds, (failure, None), strict=True):
        context = SimpleNamespace(failure=failed, step=3)
        access: Any = SimpleNamespace(context=context, moved=0, arrays=SimpleNamespace(device=torch.device("cpu")))
        tape: Any = SimpleNamespace(elsewhere=elsewhere)
        ranks: Any = line
        Crossing(access, tape, ranks, HostStreams(), None).kinds()[kind](Op(id=stage_op(kind, 1, 0), peer=1))
        ends.append(access)
    assert not line.messages
    return line.sent, ends


def crossed(
    tensor: torch.Tensor | None, probed: torch.Tensor, failure: NonFiniteError | None = None
) -> tuple[torch.Tensor | None, list[int], list[Any]]:
    """A gradient as it comes out; the bytes of the messages; and both ends."""
    elsewhere = Elsewhere(tensor, Kind.of(probed))
    messages, ends = cross(elsewhere, ("SD", "RD"), failure)
    return elsewhere.tensor, messages, ends


def test_what_has_come_stays_as_it_is_when_more_comes_the_same_way() -> None:
    """Messages have one memory, one after the other."""
    line, sent = Line(), [torch.randn(3, 5), torch.randn(3, 5), None, torch.randn(3, 5)]
    elsewhere: Any = Elsewhere(None, Kind.of(torch.empty(3, 5)))
    access: Any = SimpleNamespace(
        context=SimpleNamespace(failure=None, step=3), moved=0, arrays=SimpleNamespace(device=torch.device("cpu"))
    )
    tape: Any = SimpleNamespace(elsewhere=elsewhere)
    ranks: Any = line
    kinds, come = Crossing(access, tape, ranks, HostStreams(), None).kinds(), list[torch.Tensor | None]()
    for tensor in sent:
        elsewhere.tensor = tensor
        kinds["SD"](Op(id=stage_op("SD", 1, 0), peer=1))
        kinds["RD"](Op(id=stage_op("RD", 1, 0), peer=1))
        come.append(elsewhere.tensor)
    for before, after in zip(sent, come, strict=True):
        assert (before is None) == (after is None)
        assert before is None or after is None or torch.equal(before, after)


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


def test_all_that_a_stage_is_handed_besides_its_input_goes_in_one_message_but_for_what_is_large_or_unforeseen() -> None:
    sent = list(TENSORS.values())
    probed = [torch.empty(11, dtype=t.dtype) if what == "turned" else t for what, t in TENSORS.items()]
    elsewhere = Besides(sent, probed)
    messages, ends = cross(elsewhere, ("SX", "RX"), NonFiniteError("inf"))
    assert list(elsewhere.come) == list(range(len(sent)))
    for number, got in elsewhere.come.items():
        assert torch.equal(got, sent[number])
        assert (got.stride(), got.dtype) == (sent[number].stride(), sent[number].dtype)
    assert [end.moved for end in ends] == [sum(Kind.of(t).nbytes for t in sent)] * 2
    assert messages[1:] == [Kind.of(TENSORS[what]).nbytes for what in ("turned", "large")]
    assert "a loss of rank 0 is infinite or NaN" in str(ends[1].context.failure)


def test_nothing_goes_where_a_stage_is_handed_its_input_alone() -> None:
    messages, _ = cross(Besides([], []), ("SX", "RX"))
    assert messages == []

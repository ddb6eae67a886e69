"""A rank that waits in a call of an engine which others have not come to says in which, and for whom."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock import Engine
from penstock.errors import RankError
from penstock.ranks import watch
from penstock.ranks.calls import Calls
from tests.models import PLAIN
from tests.patience import until
from tests.ranks.worlds import World, pipeline, together
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")


def test_who_has_begun_fewer_calls_is_missing_in_the_last() -> None:
    calls = Calls()
    with calls.call("step"), calls.call("save"):
        assert (calls.begun, calls.name) == (1, "step")
    for rank, begun in enumerate([1, 2, 1], start=1):
        calls.hear(rank, begun)
    with calls.call("save"):
        assert (calls.name, calls.missing()) == ("save", [1, 3])
        calls.hear(3, 2)
        assert calls.missing() == [1]
    assert calls.missing() == []


def heard() -> list[str]:
    """From now on what this rank says, soon."""
    watch.LONG = 0.5
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    return said


def give_up_when_told(engines: Sequence[Engine]) -> None:
    """As somebody who reads that this rank waits for another one might."""
    watch.LONG = 0.5
    handler = logging.Handler()

    def give_up(record: logging.LogRecord) -> None:
        if "goes on waiting, for rank" in record.getMessage():
            for engine in engines:
                engine.inside.resources.ranks.fail(TimeoutError(record.getMessage()))

    handler.emit = give_up  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)


def alone(mesh: DeviceMesh, path: Path) -> None:
    """The first rank is told of the other one while it waits for it, and gives up then. The other one has given up a
    collective by then."""
    ended = path.parent / "ended"
    with wrap(PLAIN, budget(None), mesh=mesh) as engine:
        give_up_when_told([engine])
        try:
            engine.save(path) if mesh.get_rank() == 0 else dist.barrier()
        except RankError:
            if mesh.get_rank():
                with pytest.raises(RankError, match="have to be started again: rank 0 has failed"):
                    wrap(PLAIN, budget(None), mesh=mesh)
                ended.touch()
            until(ended.exists)  # a process that ends ends the other's barrier
            raise


def test_a_call_of_one_rank_alone_is_said_on_the_rank_that_waits(tmp_path: Path) -> None:
    for f in World(2, alone, tmp_path / "snapshot").outcomes():
        assert f.kind == "RankError"
        assert "rank 0 has failed: TimeoutError: rank 0 has waited in save for" in f.said
        assert "and goes on waiting, for rank 1: all ranks make every call" in f.said


def gathers_alone(mesh: DeviceMesh, told: Path) -> str:
    """What is said on a rank. The loss has a collective, which the second comes to once the first has said so."""
    said, comes = heard(), [True]

    def loss_fn(model: Any, micro_batch: Any) -> Any:
        if comes and comes.pop():
            if mesh.get_rank():
                until(told.exists)
            dist.barrier()
        return PLAIN.loss_fn(model, micro_batch)

    def tell(record: logging.LogRecord) -> bool:
        if "waited within" in record.getMessage():
            told.touch()
        return True

    logging.getLogger("penstock").addFilter(tell)
    with wrap(PLAIN, budget(None), mesh=mesh, loss_fn=loss_fn) as engine:
        engine.evaluate(PLAIN.micro_batches(1))
    return "\n".join(said)


def test_a_long_wait_in_a_collective_of_a_loss_is_said_on_the_rank_that_waits(tmp_path: Path) -> None:
    first, second = together(2, gathers_alone, tmp_path / "told")
    assert "rank 0 has waited within evaluate for" in first
    assert "a collective that is not the engine's, as of a loss_fn" in first
    assert "waited within" not in second


def receives_late(mesh: DeviceMesh) -> list[str]:
    said = heard()
    with wrap(PLAIN, budget(None), mesh=mesh) as engine:
        ranks = engine.inside.resources.ranks
        with ranks.together("step"):
            if mesh.get_rank():
                time.sleep(1.5)
                ranks.send(torch.ones(4), 0)
            else:
                ranks.receive(torch.empty(4), 1)
    return [words for words in said if "waited within" in words]


def test_a_message_of_the_engine_is_none_of_other_code_however_long_it_takes() -> None:
    """In the main thread another one waits for it."""
    assert pipeline(2, receives_late) == [[], []]


def reads_alone(mesh: DeviceMesh) -> set[str]:
    """What the first rank is said to be in while it reads its copy of all values, and the other one does not."""
    with wrap(PLAIN, budget(None), mesh=mesh, stage=0) as engine:
        resources, values = engine.inside.resources, engine.values()
        fetch = resources.arrays.fetch
        called: set[str] = set()

        def noted(*args: Any) -> None:
            called.add(resources.ranks.in_call)
            fetch(*args)

        resources.arrays.fetch = noted  # type: ignore[method-assign]
        for name in values.parameters if mesh.get_rank() == 0 else ():
            values.parameter(name)
    return called


def test_a_rank_that_has_all_values_reads_them_alone_in_no_call_that_others_miss() -> None:
    assert together(2, reads_alone) == [{"no call"}, set()]

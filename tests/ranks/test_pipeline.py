"""A pipeline is one rank: whatever the number of its ranks, the same losses, norms and state, bit by bit; what crosses
is what the schedule says; what cannot be sent is refused by name."""

import gc
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from tests.conftest import Campaign
from tests.models import MODELS, PLAIN
from tests.programs import sent_bytes
from tests.ranks.test_bits import CASES, Run, equal, results
from tests.ranks.worlds import RankFailedError, World, own_refusals, pipeline, refusals, together
from tests.training import AT_ONCE, budget, run_steps, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (12, 8, 12, 8, 8)
ALIKE = (12, 12, 12)
"""Of a run's last step, whose bytes a formula knows."""
STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What decides about a run's numbers."""

    model: str
    precision: str = "fp32"
    clip: float | None = 0.5
    lengths: tuple[int, ...] = LENGTHS
    strands: int | None = None

    def settings(self) -> dict[str, Any]:
        return {"precision": self.precision, "clip_grad_norm": self.clip, "strands": self.strands}


def trained(mesh: DeviceMesh | None, numbers: Numbers, run: Run, disk: Path | None, steps: int = STEPS) -> Any:
    """What a run has found and left; then, of a rank of a pipeline, the bytes that it has sent in its last step, those
    that the schedule says, and those of the formula."""
    where = budget(disk if run.disk else None, **run.budget)
    case = CASES[numbers.model]
    with wrap(case, where, mesh=mesh, **numbers.settings(), **run.settings) as engine:
        first, alike = steps_of(case, steps - 1, lengths=numbers.lengths), steps_of(case, 2, first=60, lengths=ALIKE)
        found = results(engine, run_steps(engine, [*first, alike[0]]))
        plan = engine.plan
        found["evaluated"] = engine.evaluate(steps_of(case, 1, first=50, lengths=numbers.lengths)[0])
        if mesh is None or mesh.size() == 1:
            return found
        engine.step(alike[1])
        assert engine.plan is plan, "whose shapes it has had"
        moved = sum(event.bytes for event in engine.trace if event.lane == "send")
        formula = sent_bytes(engine.plan.program, len(ALIKE))
        return found, (moved, engine.plan.schedule.bytes_per_lane()["send"], formula)


@cache
def alone(numbers: Numbers) -> dict[str, Any]:
    found: dict[str, Any] = trained(None, numbers, Run(), None)
    return found


FP32, BF16 = (Numbers(model="tied", precision=precision, clip=0.1075) for precision in ("fp32", "bf16"))
ONE_PIECE, LOOPED, SPLIT = ({"schedule": order} for order in ("1f1b", "interleaved-1f1b", "zero-bubble"))
WAYS: dict[str, tuple[Numbers, Run]] = {
    "in memory": (FP32, Run()),
    "on disk, early, bf16": (BF16, Run(disk=True, settings={"speculate": True})),
    "on disk, after the norm": (BF16, Run(disk=True, settings={"speculate": False})),
    "all on disk": (
        FP32,
        Run(disk=True, settings={"speculate": False}, budget={"gradients": "disk", "activations": "disk"}),
    ),
    "delayed": (FP32, Run(disk=True, settings={"delay": 0.5})),
    "fp16": (Numbers(model="gpt2", precision="fp16"), Run()),
    "no limit": (replace(BF16, clip=None), Run(disk=True)),
    "one op at a time": (FP32, Run(settings={"overlap": False})),
    "llama": (Numbers(model="llama"), Run(disk=True)),
    "llama, sdpa": (Numbers(model="llama_sdpa", precision="bf16"), Run()),
    "two kinds of masks": (Numbers(model="gemma3"), Run(disk=True)),
    "masked": (Numbers(model="bert"), Run()),
    "images": (Numbers(model="vit"), Run(disk=True)),
    "images in bf16": (Numbers(model="vit", precision="bf16"), Run()),
    "hidden states are collected": (Numbers(model="collecting", lengths=(12,)), Run(settings={"deal": [2, 1]})),
    "dealt unevenly": (BF16, Run(disk=True, settings={"deal": [2, 1]})),
    "1f1b in memory": (FP32, Run(settings=ONE_PIECE)),
    "1f1b on disk, early, bf16": (BF16, Run(disk=True, settings=ONE_PIECE | {"speculate": True})),
    "1f1b, all on disk": (
        FP32,
        Run(
            disk=True,
            settings=ONE_PIECE | {"speculate": False},
            budget={"gradients": "disk", "activations": "disk", "weights": "disk"},
        ),
    ),
    "1f1b, one op at a time": (FP32, Run(disk=True, settings=ONE_PIECE | {"overlap": False})),
    "1f1b, two kinds of masks": (Numbers(model="gemma3"), Run(settings=ONE_PIECE)),
    "1f1b, fp16": (Numbers(model="gpt2", precision="fp16"), Run(settings=ONE_PIECE)),
    "1f1b, strands": (replace(FP32, strands=2), Run(disk=True, settings=ONE_PIECE)),
    "1f1b, dealt unevenly": (BF16, Run(disk=True, settings=ONE_PIECE | {"deal": [2, 1]})),
    "interleaved in memory": (FP32, Run(settings=LOOPED | {"deal": [2, 1]})),
    "interleaved, one op at a time": (BF16, Run(disk=True, settings=LOOPED | {"deal": [2, 1], "overlap": False})),
    "interleaved of many": (BF16, Run(disk=True, settings=LOOPED)),
    "zero bubble in memory": (FP32, Run(settings=SPLIT)),
    "zero bubble of many": (
        Numbers(model="llama_sdpa", precision="bf16", strands=2, lengths=(12,) * 9),
        Run(disk=True, settings=SPLIT | {"speculate": True}),
    ),
    "zero bubble of one": (Numbers(model="llama", lengths=(12,)), Run(settings=SPLIT | {"overlap": False})),
    "zero bubble, all on disk": (
        FP32,
        Run(
            disk=True,
            settings=SPLIT | {"speculate": False},
            budget={"gradients": "disk", "activations": "disk", "weights": "disk"},
        ),
    ),
    "zero bubble, two kinds of masks": (Numbers(model="gemma3"), Run(settings=SPLIT)),
    "zero bubble, fp16": (Numbers(model="gpt2", precision="fp16"), Run(settings=SPLIT)),
}
IN_SHORT = (
    ("images in bf16", 2),
    ("on disk, early, bf16", 2),
    ("delayed", 3),
    ("two kinds of masks", 2),
    ("hidden states are collected", 2),
    ("1f1b, all on disk", 3),
    ("1f1b, strands", 2),
    ("interleaved in memory", 2),
    ("zero bubble in memory", 3),
    ("zero bubble of one", 2),
    ("zero bubble, all on disk", 3),
)
ELSEWHERE = (
    "on disk, early, bf16",
    "two kinds of masks",
    "hidden states are collected",
    "1f1b, all on disk",
    "1f1b, strands",
    "interleaved in memory",
    "zero bubble in memory",
)
"""Of which test_beside, test_accelerator and test_ulysses run the same, or the like, each time."""


def compare(way: str, size: int, disk: Path) -> None:
    numbers, run = WAYS[way]
    for found, (moved, said, formula) in pipeline(size, trained, numbers, run, disk):
        equal(found, alone(numbers))
        assert moved == said == formula


@pytest.mark.parametrize(
    ("way", "size"),
    [pytest.param(*one, marks=[pytest.mark.campaign] if one[0] in ELSEWHERE else []) for one in IN_SHORT],
)
def test_a_pipeline_has_the_bits_of_one_rank(way: str, size: int, tmp_path: Path) -> None:
    compare(way, size, tmp_path / "store")


def test_a_pipeline_of_any_size_has_the_bits_of_one_rank(campaign: Campaign, tmp_path: Path) -> None:
    if not campaign.full:
        pytest.skip("a campaign takes all ways and ranks: --campaign")
    ways = ((way, size) for way in WAYS for size in (2, 3, 4) if size == 2 or "deal" not in WAYS[way][1].settings)
    for number, (way, size) in enumerate(ways):
        compare(way, size, tmp_path / str(number))


# ---- what fails, and what is kept


CASE = PLAIN


def steps(mesh: DeviceMesh | None, disk: Path, count: int, schedule: str = "vertical") -> tuple[int, list[float]]:
    """The step that a run on a store began after, and its losses."""
    with wrap(CASE, budget(disk), mesh=mesh, schedule=schedule) as engine:
        begun = engine.step_count
        return begun, run_steps(engine, steps_of(CASE, count, first=begun + 1, lengths=LENGTHS)).losses


def to_be_killed(mesh: DeviceMesh, disk: Path, schedule: str) -> None:
    """Rank 1 in its third step, in the forward of its block."""
    with wrap(CASE, budget(disk), mesh=mesh, schedule=schedule, **AT_ONCE) as engine:
        first, second, third = steps_of(CASE, 3, lengths=LENGTHS)
        engine.step(first)
        engine.step(second)
        if mesh.get_rank() == 1:
            of_rank = engine.inside.resources.dealt.index(1)
            block = engine.model.layers[of_rank]
            block.down.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        engine.step(third)


@pytest.mark.campaign
@pytest.mark.parametrize("schedule", ["vertical", "1f1b"])
def test_a_pipeline_whose_rank_is_killed_goes_on_from_its_last_commit(schedule: str, tmp_path: Path) -> None:
    """Each time ``test_beside`` kills a rank of two pipelines, and ``test_accelerator`` one on a device."""
    whole = steps(None, tmp_path / "alone", 4)[1]
    world = World(2, to_be_killed, tmp_path / "store", schedule, axis="pp")
    first, second = world.outcomes()
    assert isinstance(first, RankFailedError)
    assert (first.kind, first.said, second) == ("RankError", "rank 1 was killed", None)
    assert pipeline(2, steps, tmp_path / "store", 2, schedule) == [(2, whole[2:])] * 2


def steps_dealt(mesh: DeviceMesh, disk: Path, deal: list[int] | None) -> tuple[list[float], tuple[int, ...]]:
    """The losses of a step, and the deal of the blocks."""
    with wrap(CASE, budget(disk), mesh=mesh, deal=deal) as engine:
        first = engine.step_count + 1
        losses = run_steps(engine, steps_of(CASE, 1, first=first, lengths=LENGTHS)).losses
        return losses, engine.inside.resources.dealt


def test_a_pipeline_goes_on_as_its_store_was_dealt(tmp_path: Path) -> None:
    """Also unevenly, as below."""
    whole, disk = steps(None, tmp_path / "alone", 1)[1], tmp_path / "store"
    assert pipeline(2, steps_dealt, disk, None) == [(whole, (0, 1, 1))] * 2
    with pytest.raises(RankFailedError, match=r"deal=\[2, 1\], and the state in .* was dealt as \[1, 2\]"):
        pipeline(2, steps_dealt, disk, [2, 1])


def steps_in(
    mesh: DeviceMesh, disk: Path, schedule: str, deal: list[int] | None = None
) -> tuple[list[float], str, tuple[int, ...]]:
    """The losses of a step, the order in which it went, and the deal of the blocks. Where the
    backward is split, that of each block is."""
    with wrap(CASE, budget(disk), mesh=mesh, schedule=schedule, deal=deal) as engine:
        first = engine.step_count + 1
        losses = run_steps(engine, steps_of(CASE, 1, first=first, lengths=LENGTHS)).losses
        own, parts = (
            engine.inside.resources.dealt.count(mesh.get_rank()),
            [op.id.kind for op in engine.plan.schedule.ops],
        )
        assert parts.count("W") == parts.count("I") == (schedule == "zero-bubble") * own * len(LENGTHS)
        return losses, engine.plan.schedule.name, engine.inside.resources.dealt


IN_LOOPS = (("interleaved-1f1b", [2, 1]), ("vertical", None), ("interleaved-1f1b", [2, 1]))
IN_ONE_PIECE = (("1f1b", [2, 1]), ("zero-bubble", None))
"""Orders that follow each other on a store, and the deals that are given."""
UNFIT = (
    ("loops", "1f1b", r"schedule='1f1b' has each rank's blocks in one piece, and the state in"),
    *(
        ("piece", order, r"in loops, .* was dealt as \[0, 0, 1\] .*: give '1f1b' or 'zero-bubble' to go on")
        for order in ("vertical", "interleaved-1f1b")
    ),
)
"""A store, an order that it was not dealt for, and what is said."""


def in_each_order(mesh: DeviceMesh, disk: Path) -> tuple[list[Any], list[Any], list[tuple[str, str]]]:
    """``steps_in`` one order after the other, on a store for loops and on one for blocks in one piece; refusals."""
    loops, piece = (
        [steps_in(mesh, disk / store, order, deal) for order, deal in orders]
        for store, orders in (("loops", IN_LOOPS), ("piece", IN_ONE_PIECE))
    )
    unfit = [{"disk": disk / store, "schedule": order} for store, order, _ in UNFIT]
    return loops, piece, refusals(mesh, steps_in, unfit)


def test_a_run_changes_its_order_where_the_deal_of_its_store_fits(tmp_path: Path) -> None:
    whole = steps(None, tmp_path / "alone", 3)[1]
    found = pipeline(2, in_each_order, tmp_path)
    for loops, piece, _ in found:
        assert loops == [([loss], order, (0, 1, 0)) for loss, (order, _) in zip(whole, IN_LOOPS, strict=True)]
        assert piece == [([loss], order, (0, 0, 1)) for loss, (order, _) in zip(whole, IN_ONE_PIECE, strict=False)]
    for (_, said), (*_, words) in zip(own_refusals([said for *_, said in found]), UNFIT, strict=True):
        assert re.search(words, said)


SHARED, DEALT = "the part of rank . of 2", "the blocks of rank . of a pipeline of 2"


@pytest.mark.parametrize(
    ("begins", "goes_on", "said"),
    [
        (together, pipeline, f"has {SHARED}, and what is asked for is {DEALT}: go on with ranks that share all state"),
        (pipeline, together, f"has {DEALT}, and what is asked for is {SHARED}: go on as a pipeline of 2, or cut it"),
    ],
)
def test_a_store_of_ranks_of_another_kind_is_called_that(begins: Any, goes_on: Any, said: str, tmp_path: Path) -> None:
    begins(2, steps, tmp_path / "store", 1)
    with pytest.raises(RankFailedError, match=said):
        goes_on(2, steps, tmp_path / "store", 1)


def repeated(mesh: DeviceMesh | None, disk: Path) -> Any:
    """Blocks that are not trained: the other rank has nothing that could step early, or again."""
    model = CASE.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" not in name)
    with wrap(CASE, budget(disk), mesh=mesh, model=model, clip_grad_norm=0.5) as engine:
        return results(engine, run_steps(engine, steps_of(CASE, 2, lengths=LENGTHS)))


def test_all_ranks_run_a_step_again_or_none_does(tmp_path: Path) -> None:
    wanted = repeated(None, tmp_path / "alone")
    for found in pipeline(2, repeated, tmp_path / "several"):
        equal(found, wanted)


def kept(mesh: DeviceMesh | None, snapshot: Path, *, saves: bool) -> Any:
    """A run that saves after two steps, or goes on from there; what it has in the end."""
    with wrap(CASE, budget(None), mesh=mesh) as engine:
        first, rest = steps_of(CASE, 3, lengths=LENGTHS)[:2], steps_of(CASE, 3, lengths=LENGTHS)[2:]
        if saves:
            run_steps(engine, first)
            engine.save(snapshot)
        else:
            engine.load(snapshot)
        return results(engine, run_steps(engine, rest))


def saved_and_kept(mesh: DeviceMesh, folder: Path) -> list[Any]:
    saved = kept(mesh, folder / "several", saves=True)
    return [saved, *(kept(mesh, folder / source, saves=False) for source in ("one", "several"))]


def test_a_snapshot_of_a_pipeline_is_one_of_any_ranks(tmp_path: Path) -> None:
    wanted = kept(None, tmp_path / "one", saves=True)
    for of_rank in pipeline(2, saved_and_kept, tmp_path):
        for found in of_rank:
            equal(found, wanted)
    equal(kept(None, tmp_path / "several", saves=False), wanted)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Model(nn.Module):
    """``computes``: the model's own code computes with what a block puts out; ``weighs``: with weights, too;
    ``shortens``: one block is called; ``fails``: the loss is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(16))
        self.computes = self.weighs = self.shortens = self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: 1 if self.shortens else 4]:
            x = block(x)
            if self.computes:
                x = x * 2
            if self.weighs:
                x = x * self.scale
        return x.square().mean() * (float("nan") if self.fails else 1.0)


def misused(mesh: DeviceMesh, how: str, schedule: str = "vertical") -> Any:
    torch.manual_seed(0)
    model, inputs = Model(), [{"x": torch.ones(2, 16)}] * 2
    settings = {"optimizer": penstock.AdamW(), "loss_fn": lambda m, b: m(b["x"]), "clip_grad_norm": None}
    settings |= {"schedule": schedule}
    with penstock.wrap(model, budget=budget(None), mesh=mesh, device="cpu", **settings) as engine:
        if how.endswith(" at once"):
            setattr(model, how.removesuffix(" at once"), True)
        engine.step(inputs)
        before = dict(engine.master_parameters())
        setattr(model, how, True)
        try:
            engine.step(inputs)
        except penstock.errors.NonFiniteError as error:
            model.fails = False
            after = dict(engine.master_parameters())
            return str(error), all(torch.equal(value, after[name]) for name, value in before.items()), engine.step_count
        return None


COMPUTES = r"the model's (own )?code computes with"
CALLS_NONE = r"calls none of the blocks that rank \d of the pipeline has"
MISUSED: tuple[tuple[dict[str, str], str], ...] = (
    *(({"how": how}, COMPUTES) for how in ("computes", "computes at once", "weighs at once")),
    *(({"how": "shortens at once", "schedule": schedule}, CALLS_NONE) for schedule in ("vertical", "1f1b")),
)


def test_code_that_computes_between_blocks_of_other_ranks_or_calls_none_of_them_is_refused() -> None:
    """And gives no other numbers."""
    found = pipeline(3, refusals, misused, [case for case, _ in MISUSED])
    for (kind, said), (case, words) in zip(own_refusals(found), MISUSED, strict=True):
        assert kind == "ModelError", case
        assert re.search(words, said), case


def not_a_number(mesh: DeviceMesh) -> list[Any]:
    return [misused(mesh, "fails", schedule) for schedule in ("vertical", "1f1b")]


def test_a_loss_that_is_no_number_is_one_for_all_ranks_and_nothing_is_updated() -> None:
    for of_rank in pipeline(2, not_a_number):
        for said, unchanged, count in of_rank:
            assert "the loss is nan" in said
            assert (unchanged, count) == (True, 1)


def alternating(mesh: DeviceMesh | None) -> Any:
    """Steps of two lengths in turn: losses, and the number of plans from the third step on."""
    plans, losses = [], []
    with wrap(CASE, budget(None), mesh=mesh) as engine:
        for step in range(6):
            lengths = ((12, 12), (8, 8))[step % 2]
            losses.append(engine.step(steps_of(CASE, 1, first=1 + step, lengths=lengths)[0]).loss)
            plans.append(engine.plan)
    return losses, len({id(plan) for plan in plans[1:]})


def test_steps_of_alternating_lengths_have_one_plan() -> None:
    losses, _ = alternating(None)
    for found, plans in pipeline(2, alternating):
        assert (found, plans) == (losses, 1)


class Written(Model):
    """Its own code writes in place to a tensor that blocks of several ranks are handed: if ``at`` all, and in which
    mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Added() for _ in range(4))
        self.at: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x, bias)
            if self.at == self.training:
                bias.add_(1)
        return x.square().mean()


class Added(Block):
    """``look``: told what it is handed besides its input."""

    look: Callable[[torch.Tensor], None] | None = None

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.look is not None:
            self.look(bias)
        return super().forward(x) + bias


class Unread(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class Handing(Model):
    """Its own code makes a tensor that all blocks are handed, and none reads, as positions may be."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unread() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape)
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def handing(mesh: DeviceMesh | None) -> list[float]:
    torch.manual_seed(0)
    inputs = [{"x": torch.ones(2, 16)}] * 2
    settings = {"optimizer": penstock.AdamW(), "loss_fn": lambda m, b: m(b["x"])}
    with penstock.wrap(Handing(), budget=budget(None), mesh=mesh, device="cpu", **settings) as engine:
        return [engine.evaluate(inputs), engine.step(inputs).loss, engine.evaluate(inputs)]


def test_what_blocks_are_handed_and_none_reads_is_there_until_it_is_sent() -> None:
    wanted = handing(None)
    for found in pipeline(2, handing):
        assert found == wanted


def writing(mesh: DeviceMesh, *, later: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Written(), [{"x": torch.ones(2, 16)}] * 2
    settings = {"optimizer": penstock.AdamW(), "loss_fn": lambda m, b: m(b["x"])}
    with penstock.wrap(model, budget=budget(None), mesh=mesh, device="cpu", **settings) as engine:
        if later:
            engine.evaluate(inputs)
        model.at = False
        engine.evaluate(inputs)


def test_a_tensor_that_several_ranks_are_handed_and_that_is_written_to_is_refused() -> None:
    """As the probe sees it, or in a later pass."""
    for kind, said in own_refusals(pipeline(3, refusals, writing, [{"later": later} for later in (False, True)])):
        assert kind == "ModelError"
        assert "in place" in said


class Odd(Model):
    """Its own code hands blocks a tensor that is ``how`` another time another one, with no version that says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Added() for _ in range(4))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = bool(x[0, 0] > 1)
        whole, later = self.how == "of another dtype" and second, self.how == "by numpy later" and not second
        bias = torch.ones(16, dtype=torch.int32 if whole else torch.float32)
        for number, block in enumerate(self.blocks):
            if self.how == "written to" and number == 3:
                bias.data.add_(1)
            if number == 3 and (self.how == "by numpy" or later):
                bias.numpy()[:] += 1
            if self.how == "put elsewhere":
                bias.data = torch.tensor([float(number)] * 16)
            x = block(x, bias)
        return x.square().mean()


CHANGED = {
    "written to": "block 'blocks.3': its argument number 1 was written to in place since",
    "by numpy": "block 'blocks.3': its argument number 1 was written to in place since",
    "put elsewhere": None,
    "by numpy later": r"argument number 1 was written to in place since .*\. Another rank",
    "of another dtype": r"argument number 1 is a tensor of torch\.\w+, and was one of torch\.\w+\. Another rank",
}
"""What is said of it, at last in a run, which ends the ranks; None: it is as on one rank."""


def evaluated_oddly(mesh: DeviceMesh | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    inputs = [{"x": torch.full((2, 16), value)} for value in (1.0, 2.0)]
    settings = {"optimizer": penstock.AdamW(), "loss_fn": lambda m, b: m(b["x"])}
    for how in CHANGED:
        torch.manual_seed(0)
        with penstock.wrap(Odd(how), budget=budget(None), mesh=mesh, device="cpu", **settings) as engine:
            try:
                found[how] = engine.evaluate(inputs)
            except (penstock.errors.ModelError, penstock.errors.RankError) as error:
                found[how] = str(error)
    return found


def test_what_blocks_are_handed_is_sent_as_it_is_then_or_refused() -> None:
    wanted = evaluated_oddly(None)
    first, second = pipeline(2, evaluated_oddly)
    for how, said in CHANGED.items():
        if said is None:
            assert first[how] == second[how] == wanted[how]
        else:
            assert re.search(said, first[how])
            assert isinstance(second[how], str)


def handed_at_once(mesh: DeviceMesh, schedule: str) -> int:
    """The most micro-batches at once of which a rank has what its blocks are handed besides their input."""
    torch.manual_seed(0)
    model, inputs, most = Written(), [{"x": torch.ones(2, 16)}] * 8, 0
    model.at = None
    seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def look(bias: torch.Tensor) -> None:
        nonlocal most
        seen[id(bias)] = weakref.ref(bias)
        most = max(most, sum(ref() is not None for ref in seen.values()))

    settings = {"optimizer": penstock.AdamW(), "loss_fn": lambda m, b: m(b["x"]), "schedule": schedule}
    with penstock.wrap(model, budget=budget(None), mesh=mesh, device="cpu", **settings) as engine:
        engine.step(inputs)
        for block in model.blocks:
            block.look = look
        engine.step(inputs)
    return most


def handed_in_each(mesh: DeviceMesh) -> list[int]:
    return [handed_at_once(mesh, schedule) for schedule in ("vertical", "1f1b")]


def test_in_turn_masks_and_the_like_are_kept_of_micro_batches_that_are_under_way() -> None:
    vertical, in_turn = pipeline(2, handed_in_each)[1]
    assert vertical == 8
    assert 1 <= in_turn <= 3, "as many as the first rank has under way"


def refused(mesh: DeviceMesh, model: str, **settings: Any) -> None:
    with wrap(MODELS[model], budget(None), mesh=mesh, **settings) as engine:
        engine.step(steps_of(MODELS[model], 1)[0])


def with_batches_of_their_own(mesh: DeviceMesh) -> None:
    with wrap(CASE, budget(None), mesh=mesh) as engine:
        engine.step(steps_of(CASE, 1, first=1 + mesh.get_rank())[0])


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "t5",
        {},
        r"its argument .* needs a gradient, and is not what the call before .* all state \(without a pipeline\)",
    ),
    ("mixtral", {}, r"it returns 2 tensors, and one is sent \(leave out a router's loss: output_router_logits=False"),
    ("gpt2", {"replan": True, "plan": "auto"}, "replan=True is not for the ranks of a pipeline"),
    ("gpt2", {"deal": [1, 1]}, "the model's 3 blocks each rank of a pipeline has: the sum must be that"),
    ("gpt2", {"deal": [1, 1, 1]}, "is for 3 ranks, and the pipeline has 2"),
    ("gpt2", {"schedule": "1f1b", "delay": 0.5}, r"delay=0\.5 needs schedule='vertical': others go to every block"),
    ("gpt2", {"schedule": "horizontal"}, r"schedule='horizontal' is not for the ranks of a pipeline \(2 in each\)"),
)


def refused_and_given_other_micro_batches(mesh: DeviceMesh) -> list[tuple[str, str]]:
    """Of the latter nothing would be trained on, but on the first rank's."""
    found = refusals(mesh, refused, [{"model": model, **more} for model, more, _ in REFUSED])
    return found + refusals(mesh, with_batches_of_their_own, [{}])


def test_what_a_pipeline_cannot_do_is_refused_by_name() -> None:
    messages = [*(message for *_, message in REFUSED), "all ranks need the same micro-batches, which ranks of a pipe"]
    for found in pipeline(2, refused_and_given_other_micro_batches):
        for (_, said), message in zip(found, messages, strict=True):
            assert re.search(message, said)


def again_and_again(mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Open files and threads after each of several engines."""
    found = list[tuple[int, int]]()
    for step in steps_of(CASE, 5):
        with wrap(CASE, budget(None), mesh=mesh) as engine:
            engine.step(step)
        del engine
        gc.collect()
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return found


def test_engines_one_after_the_other_leave_no_more_behind_than_the_first() -> None:
    for found in pipeline(2, again_and_again):
        files, threads = zip(*found, strict=True)
        assert max(files[3:]) <= max(files[:3])  # connections come and go as ranks find time
        assert set(threads) == {1}


class Frozen(nn.Module):
    """Its first block does not train."""

    WIDTH = 256

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(self.WIDTH, 1)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x).square().mean()


def with_longer_batches(mesh: DeviceMesh, disk: Path) -> list[str]:
    """The tiers of weights after a step, and after one whose activations need their room."""
    where = penstock.Budget(device="5.6MiB", host="5.5MiB", disk=disk)
    settings = {"optimizer": penstock.AdamW(), "loss_fn": lambda m, b: m(b["x"]), "delay": 0, "deal": [3, 1]}
    found = []
    with penstock.wrap(Frozen(), budget=where, mesh=mesh, device="cpu", **settings) as engine:
        for rows in (16, 330):
            engine.step([{"x": torch.ones(rows, Frozen.WIDTH)}] * 2)
            found += [engine.inside.resources.arrays.tier_of(f"weights.{g}") for g in (0, 1)]
    return found


def test_weights_of_one_rank_that_move_to_disk_are_committed_by_all(tmp_path: Path) -> None:
    first, second = pipeline(2, with_longer_batches, tmp_path / "store")
    assert "device" in first[:2]
    assert {*first[2:], *second} == {"disk"}

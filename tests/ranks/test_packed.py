"""Packed documents in a pipeline: what a micro-batch itself says of them every rank has, whatever their number, and
blocks of other ranks are handed that. So the bits are those of one rank; what they would not be handed is refused."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from tests.models import MODELS, VOCABULARY
from tests.ranks.test_bits import equal, results
from tests.ranks.worlds import own_refusals, pipeline, refusals
from tests.training import budget, run_steps, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = MODELS["llama_sdpa"]
STEPS = (((2, 4, 6, 9), (), (5,)), ((3, 7), (6,), (1, 2, 11)), ((), (1, 11), (4, 5)))
"""Of each micro-batch of each step, where documents but the first begin."""


def packed(begins: tuple[int, ...], seed: int, length: int = 12) -> dict[str, Any]:
    """A row of documents as TRL's collator gives it."""
    ends = torch.tensor([0, *begins, length], dtype=torch.int32)
    sizes = ends.diff()
    places = torch.cat([torch.arange(n) for n in sizes.tolist()])[None]
    tokens = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(places == 0, -100),
        "position_ids": places,
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends),
        **dict.fromkeys(("max_length_q", "max_length_k"), int(sizes.max())),
        "seq_idx": torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes)[None],
    }


def trained(mesh: DeviceMesh | None, schedule: str) -> tuple[Any, bool]:
    """What a run has found, and whether the plan of its first step was that of all."""
    steps = [[packed(begins, 10 * i + m) for m, begins in enumerate(step)] for i, step in enumerate(STEPS)]
    with wrap(CASE, budget(None), mesh=mesh, schedule=schedule, strands=2) as engine:
        first = run_steps(engine, steps[:1])
        plan = engine.plan
        found = results(engine, run_steps(engine, steps[1:]))
        found["losses"] = first.losses + found["losses"]
        same = engine.plan is plan
        found["evaluated"] = engine.evaluate(steps[1])
        return found, same


@pytest.mark.parametrize("schedule", ["vertical", pytest.param("1f1b", marks=pytest.mark.campaign)])
def test_packed_documents_have_the_bits_of_one_rank_and_one_plan_for_fewer_of_them(schedule: str) -> None:
    wanted, _ = trained(None, "vertical")
    for found, same in pipeline(2, trained, schedule):
        equal(found, wanted)
        assert same


class Scaled(nn.Module):
    """``writes``: to what it is handed besides its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.writes = False

    def forward(self, x: torch.Tensor, bias: torch.Tensor, *, factor: float) -> torch.Tensor:
        if self.writes:
            bias.add_(1)
        return x + factor * self.linear(x + bias).tanh()


class Model(nn.Module):
    """Hands its blocks a tensor and a number of the micro-batch's own; ``times`` that number; ``unseen``: it writes to
    the tensor before, and no version says so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.times, self.unseen = 1, False

    def forward(self, x: torch.Tensor, bias: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        if self.unseen:
            bias.data.mul_(3)
        for block in self.blocks:
            x = block(x, bias, factor=factor * self.times)
        return x.square().mean()


def handing(mesh: DeviceMesh | None, how: str = "") -> Any:
    """Losses of steps, whose micro-batches have factors of their own, and the bytes that are sent besides inputs."""
    torch.manual_seed(0)
    model, inputs = Model(), [{"x": torch.ones(2, 16), "bias": torch.ones(2, 16), "factor": f} for f in (0.5, 2.0)]
    model.times, model.unseen = 2 if how == "twice" else 1, how == "unseen"
    settings = {"optimizer": penstock.AdamW(), "loss_fn": lambda m, b: m(**b)}
    with penstock.wrap(model, budget=budget(None), mesh=mesh, device="cpu", **settings) as engine:
        losses = [engine.step(inputs).loss]
        for block in model.blocks:
            block.writes = how == "writes"
        model.times = 2 if how in ("twice", "twice later") else 1  # a number: no reason to probe again
        if how == "left out":
            del inputs[1]["factor"], inputs[0]["factor"]
        losses += [engine.step(inputs).loss, engine.evaluate(inputs)]
        return losses, 0 if engine.plan.program.dealt is None else sum(engine.plan.program.dealt.besides)


def handing_as_it_is_and_unseen(mesh: DeviceMesh | None) -> list[Any]:
    return [handing(mesh, how) for how in ("", "unseen")]


def test_what_a_micro_batch_holds_is_each_ranks_own_and_what_the_models_code_has_written_to_is_sent() -> None:
    """As it is then."""
    (wanted, _), (written, _) = handing_as_it_is_and_unseen(None)
    for (losses, besides), (others, sent) in pipeline(2, handing_as_it_is_and_unseen):
        assert losses == wanted
        assert besides == 0
        assert others == written
        assert sent > 0


OTHERS = {
    "twice": r"its argument 'factor' is 1\.0, and was 4\.0\. Another rank .* or give the value with the micro-b",
    "twice later": r"its argument 'factor' is 1\.0, and that of the micro-batch is 0\.5",
    "writes": "in place",
    "left out": "micro-batch 0 has no number or text 'factor', which block 'blocks.1' was handed",
}


def test_another_value_than_other_ranks_would_hand_their_blocks_is_refused() -> None:
    found = own_refusals(pipeline(2, refusals, handing, [{"how": how} for how in OTHERS]))
    for (kind, said), (how, words) in zip(found, OTHERS.items(), strict=True):
        assert kind == "ModelError", how
        assert re.search(words, said), how

"""Ranks that share each sequence are one process but for the rounding of its sums: losses, norms and state, whatever a
model's heads share, packed documents, windows, padding. Among schedules, and over an end, all bits are equal.
"""

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.engine.labels import IGNORED
from penstock.hardware.machine import Network
from penstock.hf.pieces import as_micro_batch, loss_of_piece
from penstock.planner.longest import longest
from penstock.schedule.place import Format
from penstock.schedule.program import Stage
from penstock.shape.huggingface import HuggingFaceModel
from penstock.shape.meta import MetaModel
from tests import models
from tests.hf import test_long_sequences as long_sequences
from tests.models import MODELS, Case
from tests.planner.test_search import MIB
from tests.ranks.worlds import World, own_refusals, refusals, sharing, together
from tests.training import Result, budget, relative, run_steps, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

Built = dict[str, torch.Tensor]
STEPS = 2


def tokens(generator: torch.Generator, rows: int, length: int) -> Built:
    """Rows whose first two thirds have no labels, so that a span has none."""
    found = models.causal_lm(generator, rows, length)
    found["labels"][:, : 2 * length // 3] = IGNORED
    return found


def packed(generator: torch.Generator, rows: int, length: int) -> Built:
    """Documents of 5 tokens and the rest, and of 9 in the second row: their ends are nowhere near those of spans."""
    found = models.causal_lm(generator, rows, length)
    places = torch.arange(length).repeat(rows, 1)
    for row, end in enumerate((5, 9)):
        places[row, end:] -= end
    return found | {"position_ids": places}


def flattened(generator: torch.Generator, rows: int, length: int) -> Built:
    """Two documents in one row, with the lengths that kernels without masks take, as TRL packs them."""
    found = models.causal_lm(generator, 1, length)
    found["position_ids"] = torch.cat([torch.arange(5), torch.arange(length - 5)])[None]
    found["cu_seq_lens_q"] = found["cu_seq_lens_k"] = torch.tensor([0, 5, length], dtype=torch.int32)
    return found | {"seq_idx": (torch.arange(length, dtype=torch.int32)[None] >= 5).int()}


def padded(generator: torch.Generator, rows: int, length: int) -> Built:
    found = models.causal_lm(generator, rows, length)
    found["attention_mask"] = torch.ones(rows, length, dtype=torch.int64)
    found["attention_mask"][1, -4:] = 0
    found["labels"][1, -4:] = IGNORED
    return found


def padded_at_times(generator: torch.Generator, rows: int, length: int) -> Built:
    """Some of one size hide tokens, and some do not, though all have a mask."""
    found = padded(generator, rows, length)
    if found["input_ids"].sum() % 2:
        found["attention_mask"][:] = 1
    return found


BLOCKS = 2


def case(build: Callable[..., nn.Module], micro_batch: Callable[..., Built] = tokens, **changes: Any) -> Case:
    layers = "n_layer" if build is models.gpt2 else "num_hidden_layers"
    return Case(build=lambda: build(**{layers: BLOCKS}, **changes), micro_batch=micro_batch, blocks=BLOCKS)


CASES: Mapping[str, Case] = {
    "llama": case(models.llama, attn_implementation="sdpa"),
    "one key": case(models.llama, num_key_value_heads=1),
    "packed": case(models.llama, packed, attn_implementation="sdpa"),
    "flattened": case(models.llama, flattened, attn_implementation="sdpa"),
    "windows": case(models.mistral, packed, attn_implementation="sdpa"),
    "padded, positions learned": case(models.gpt2, padded, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "experts": case(models.qwen3_moe, output_router_logits=False),
}
EXTRA = {
    "dropout": case(models.gpt2, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "padded at times": case(models.llama, padded_at_times, attn_implementation="sdpa"),
}
PIPELINES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "vertical": ("packed", {}),
    "zero bubble": ("dropout", {"schedule": "zero-bubble"}),
    "1f1b": ("padded at times", {"schedule": "1f1b"}),
}
"""What pipelines whose ranks share sequences are trained with: a model, and settings."""
IN_SHORT = ("zero bubble",)
"""Of which every run of the tests takes some; a campaign takes all."""
LENGTHS = (24, 25, 25, 24)
"""Not all are a multiple of the ranks."""
FEWER = (25, 24)
BRIEF = dict.fromkeys(("llama", "one key", "flattened", "windows", "padded, positions learned", "experts"), (1, FEWER))
"""(steps, lengths) of the cases that show another model, or other data, alone: what follows on a step, and several
micro-batches of one shape, the others have."""
ONE_SHAPE = (25, 25)
"""What is compiled is compiled for each length."""


def steps_of(
    name: str, mesh: DeviceMesh | None, first: int = 1, lengths: tuple[int, ...] | None = None
) -> list[list[Built]]:
    """The micro-batches of a rank: those of its sequences, whole. ``lengths``: None: the case's own."""
    cut, (count, of_case) = (CASES | EXTRA)[name], BRIEF.get(name, (STEPS, LENGTHS))
    lengths = lengths or of_case
    alike = mesh is None or mesh.ndim == 1 or "pp" in (mesh.mesh_dim_names or ())
    groups = 1 if alike else mesh.size(0)
    group = 0 if alike else mesh.get_local_rank(0)
    each = len(lengths) // groups
    mine = range(group * each, (group + 1) * each)
    return [
        [cut.micro_batches(1, seed=100 * step + m, length=lengths[m])[0] for m in mine]
        for step in range(first, first + count)
    ]


def trained(
    mesh: DeviceMesh | None,
    name: str,
    disk: Path | None = None,
    first: int = 1,
    lengths: tuple[int, ...] | None = None,
    **given: Any,
) -> Result:
    places = given.pop("places", {})
    with wrap((CASES | EXTRA)[name], budget(disk, **places), mesh=mesh, **given) as engine:
        found = run_steps(engine, steps_of(name, mesh, first, lengths))
        return replace(found, state={name: one.clone() for name, one in engine.master_parameters()})


@cache
def alone(name: str, lengths: tuple[int, ...] | None = None) -> Result:
    return trained(None, name, lengths=lengths, clip_grad_norm=0.5)


def of_two(mesh: DeviceMesh, disk: Path, full: bool) -> dict[str, Any]:
    """All that two ranks find which share each sequence. ``full``: blocks are compiled under both schedules."""
    return {
        "cases": {
            name: trained(mesh, name, disk if name == "dropout" else None, clip_grad_norm=0.5) for name in CASES | EXTRA
        },
        "halves": halves(mesh, disk),
        "compiled": [
            trained(mesh, "packed", lengths=ONE_SHAPE, clip_grad_norm=0.5, compile="aot_eager", **way)
            for way in ({}, {"schedule": "horizontal", "overlap": False})[: 1 + full]
        ],
        "sent": {schedule: counted(mesh, schedule) for schedule in ("vertical", "horizontal")},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """``of_two``, by rank."""
    return sharing(2, of_two, tmp_path_factory.mktemp("two"), full=pytestconfig.getoption("--campaign"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_that_share_each_sequence_are_one_process(name: str, found: list[dict[str, Any]]) -> None:
    wanted = alone(name)
    for of_rank in found:
        close(of_rank["cases"][name], wanted)


def test_compiled_blocks_make_the_exchanges_with_the_same_bits_under_any_schedule(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        first, *others = of_rank["compiled"]
        close(first, alone("packed", ONE_SHAPE))
        for other in others:
            assert (first.losses, first.norms) == (other.losses, other.norms)
            assert [n for n, one in first.state.items() if not torch.equal(other.state[n], one)] == []


def close(found: Result, wanted: Result) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-5)
    for name, one in wanted.state.items():
        assert relative(found.state[name], one) < 1e-4, name


WAYS: Mapping[str, dict[str, Any]] = {
    "horizontal, one op at a time": {"schedule": "horizontal", "overlap": False},
    "delayed, on disk": {"delay": 0.5, "on_disk": True},
    "early, saved activations on disk, stage 2": {
        "stage": 2,
        "speculate": True,
        "on_disk": True,
        "places": {"activations": "disk"},
    },
}


def of_four(mesh: DeviceMesh, disk: Path, full: bool) -> dict[str, Any]:
    """The results of one training under several schedules, and of another, two ranks sharing each sequence. ``full``:
    all that there are."""
    four = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    common = {"clip_grad_norm": 0.5, "strands": 4}
    ways = {}
    for number, (way, given) in enumerate(WAYS.items()):
        if not full and "stage" not in given:
            continue
        given = dict(given)
        place = disk / str(number) if given.pop("on_disk", False) else None
        ways[way] = trained(four, "dropout", place, **common, **given)
    copies = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "cp"))
    ways["copies, horizontal"] = trained(copies, "dropout", **common, schedule="horizontal")
    pipeline = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    return {
        "ways": ways,
        "packed": trained(four, "packed", clip_grad_norm=0.5),
        "pipelines": {
            way: trained(pipeline, name, clip_grad_norm=0.5, **given)
            for way, (name, given) in PIPELINES.items()
            if full or way in IN_SHORT
        },
    }


@pytest.fixture(scope="module")
def found_by_four(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """``of_four``, by rank."""
    return together(4, of_four, tmp_path_factory.mktemp("four"), full=pytestconfig.getoption("--campaign"))


def test_schedules_and_tiers_change_no_bit(found_by_four: list[dict[str, Any]]) -> None:
    """With dropout within and without attention; spans and heads draw other numbers than each other."""
    for of_rank in found_by_four:
        ways = dict(of_rank["ways"])
        first = ways.pop("copies, horizontal")
        for way, other in ways.items():
            assert other.losses == first.losses, way
            assert other.norms == first.norms, way
            assert [n for n, one in first.state.items() if not torch.equal(other.state[n], one)] == [], way


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in IN_SHORT else [pytest.mark.campaign]) for way in PIPELINES]
)
def test_ranks_that_share_sequences_are_a_pipeline_with_the_same_bits(
    way: str, found_by_four: list[dict[str, Any]], found: list[dict[str, Any]]
) -> None:
    wanted = found[0]["cases"][PIPELINES[way][0]]
    by_rank = [of_rank["pipelines"][way] for of_rank in found_by_four]
    for other in by_rank:
        assert other.losses == wanted.losses
        assert other.norms == wanted.norms
        assert [n for n, one in other.state.items() if not torch.equal(wanted.state[n], one)] == []
    assert {n for other in by_rank for n in other.state} == {*wanted.state}


def test_some_that_are_padded_have_the_numbers_of_one_process(found: list[dict[str, Any]]) -> None:
    made = steps_of("padded at times", None)
    assert {bool(mb["attention_mask"].all()) for step in made for mb in step if mb["input_ids"].shape[1] == 24} == {
        True,
        False,
    }
    close(found[0]["cases"]["padded at times"], alone("padded at times"))


def test_sequences_of_several_groups_of_ranks_add_up_to_one_process(found_by_four: list[dict[str, Any]]) -> None:
    wanted = alone("packed")
    for of_rank in found_by_four:
        close(of_rank["packed"], wanted)


def test_a_run_goes_on_with_the_same_bits(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        first, second = of_rank["halves"]
        assert first.losses == second.losses
        assert [n for n, one in first.state.items() if not torch.equal(second.state[n], one)] == []


def halves(mesh: DeviceMesh, disk: Path) -> tuple[Result, Result]:
    """The last steps of a run that was not ended, and of the one on ``disk``, which was."""
    with wrap(EXTRA["dropout"], budget(None), mesh=mesh, clip_grad_norm=0.5) as engine:
        run_steps(engine, steps_of("dropout", mesh))
        found = run_steps(engine, steps_of("dropout", mesh, first=3))
        whole = replace(found, state={name: one.clone() for name, one in engine.master_parameters()})
    return whole, trained(mesh, "dropout", disk, first=3, clip_grad_norm=0.5)


class Convolved(nn.Module):
    """A block's feed-forward part that sees the token before, too, by however little."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.part(states) + 1e-30 * nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]


def convolved(**changes: Any) -> nn.Module:
    model = models.llama(**changes)
    model.model.layers[1].mlp = Convolved(model.model.layers[1].mlp)
    return model


def sees_mean(**changes: Any) -> nn.Module:
    model = models.llama(**changes)
    model.model.norm = nn.Sequential(model.model.norm, Centred())
    return model


class Centred(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states - states.mean(dim=1, keepdim=True)


def own_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    logits = model(input_ids=micro_batch["input_ids"]).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), micro_batch["labels"][:, 1:].flatten())


REFUSED: Mapping[str, tuple[Case, str]] = {
    "a block that mixes": (case(convolved), "block 'model.layers.1' mixes tokens"),
    "code that mixes": (case(sees_mean), "mixes tokens outside of its blocks"),
    "a router's loss": (case(models.mixtral), "a router's loss"),
    "sinks": (
        case(models.gpt_oss, output_router_logits=False, layer_types=["sliding_attention", "full_attention"]),
        "hands its attention 's_aux'",
    ),
    "an encoder": (MODELS["t5"], "an encoder and a decoder"),
    "no transformer": (MODELS["skips"], "no model of transformers"),
    "three heads": (
        case(models.llama, hidden_size=24, num_attention_heads=3, num_key_value_heads=3),
        "3 query heads and 3 key/value heads cannot be dealt out",
    ),
    "positions stretched to the longest": (
        case(models.llama, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "rope_type='dynamic' looks at the length of the whole sequence",
    ),
    "a loss of one's own": (replace(case(models.llama), loss_fn=own_loss), "shift_labels"),
    "looking ahead": (replace(case(models.llama, is_causal=False)), "looks ahead"),
}


def attempted(mesh: DeviceMesh, what: str) -> None:
    cut = REFUSED[what][0]
    with wrap(cut, budget(None), mesh=mesh) as engine:
        engine.step(cut.micro_batches(1, length=24))


def classifying(mesh: DeviceMesh) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    model = LlamaForSequenceClassification(LlamaConfig(**models.decoder(tie_word_embeddings=False)))
    wrap(CASES["llama"], budget(None), mesh=mesh, model=model)


class Table(nn.Module):
    """Multiplies by a constant in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = torch.eye(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table


def beside_a_table(mesh: DeviceMesh) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**models.decoder()))
    model.model.layers[1].mlp = Table(model.config.hidden_size)
    wrap(CASES["llama"], budget(None), mesh=mesh, model=model, precision="bf16")


def counted(mesh: DeviceMesh, schedule: str) -> tuple[int, tuple[Stage, ...]]:
    """Bytes that attention sends in a step, by the trace, and the stages of a span as they were probed."""
    with wrap(CASES["llama"], budget(None), mesh=mesh, schedule=schedule) as engine:
        stats = engine.step(steps_of("llama", mesh)[0])
        moved = sum(event.bytes for event in engine.trace if event.lane == "compute")
        assert stats.bytes_moved["compute"] == moved
        return moved, engine.plan.program.stages


def sent(length: int, cp: int = 2, blocks: int = BLOCKS, queries: int = 4, keys: int = 2, size: int = 8) -> int:
    """Bytes that a rank's attention sends in a forward of two rows: to be sent three times, as blocks run twice forward
    and once backward."""
    tokens = 2 * -(-length // cp)
    return blocks * tokens * (2 * queries + 2 * keys) * size * 4 * (cp - 1) // cp


def test_the_trace_has_the_bytes_of_the_formula(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        for moved, _ in of_rank["sent"].values():
            assert moved == 3 * sum(map(sent, FEWER))


def test_a_model_without_values_has_the_sizes_and_the_bytes_of_a_span(found: list[dict[str, Any]]) -> None:
    def micro_batch(rows: int, length: int) -> Built:
        return models.causal_lm(torch.Generator().manual_seed(0), rows, length)

    shape = MetaModel(name="llama", build=CASES["llama"].build, micro_batch=micro_batch, kind="cpu", cp=2)
    profile = shape.profile(2, max(LENGTHS), Format.of("fp32", 2))
    for of_rank in found:
        for _, stages in of_rank["sent"].values():
            assert sizes(stages) == sizes(profile.program.stages)
    forward, backward = (sum(both[i].sent for both in profile.work) for i in (0, 1))
    assert (forward, backward) == (sent(max(LENGTHS)), 2 * sent(max(LENGTHS)))
    forward, backward = (sum(both[i].exchanges for both in profile.work) for i in (0, 1))
    assert (forward, backward) == (2 * BLOCKS, 4 * BLOCKS)  # to all tokens and back, once more, and gradients


def sizes(stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    return [(s.activation, s.gradient, s.kept, s.forward_peak, s.backward_peak) for s in stages]


@pytest.mark.campaign
def test_ranks_that_share_sequences_have_room_for_longer_ones() -> None:
    def most(cp: int) -> int:
        asked = long_sequences.asked(4 * MIB, 128, None)
        assert isinstance(asked.shape, HuggingFaceModel)
        machine = replace(asked.machine, network=Network(bandwidth=1e9, latency=1e-5))
        found = longest(replace(asked, shape=replace(asked.shape, cp=cp), machine=machine, profiles={}))
        assert found is not None
        return found.tokens

    assert most(2) > 1.6 * most(1)


def killed(mesh: DeviceMesh, disk: Path) -> None:
    """One rank ends where the others wait for it in a block's attention."""
    with wrap(CASES["llama"], budget(disk), mesh=mesh) as engine:
        first, second = steps_of("packed", mesh)
        engine.step(first)
        if mesh.get_rank() == 1:
            engine.model.lm_head.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        engine.step(second)


def test_a_rank_that_is_killed_ends_those_that_wait_for_it_in_attention(tmp_path: Path) -> None:
    world = World(2, killed, tmp_path, axis="cp")
    waits, ended = world.outcomes()
    assert ended is None
    assert (waits.kind, "rank 1 was killed" in waits.said) == ("RankError", True), waits


def given_otherwise(mesh: DeviceMesh, what: str) -> None:
    cut = CASES["llama"].micro_batches(1, seed=mesh.get_rank() if what == "others" else 0, length=24)
    if what == "images":
        cut[0]["pixel_values"] = torch.zeros(2, 3, 4, 4)
    if what.startswith("lengths"):
        cut[0]["cu_seq_lens_q"] = torch.tensor([0, 5, 48], dtype=torch.int32)
    if what == "lengths of others":
        cut[0]["position_ids"] = torch.arange(24)[None].expand(2, 24)
    if what == "no labels":
        cut[0]["labels"][:, 1:] = IGNORED
    with wrap(CASES["llama"], budget(None), mesh=mesh) as engine:
        engine.step(cut)


UNCUT = {
    "others": "ranks 0 to 1 share each sequence, and were not given the same micro-batches",
    "images": "nobody knows which of 'pixel_values' is of which token",
    "lengths alone": "'cu_seq_lens_q' says where documents end, and it has no position_ids",
    "lengths of others": "documents begin elsewhere by 'cu_seq_lens_q' than by position_ids",
    "no labels": "micro-batch 0 has no label that counts",
}


def summed(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """A loss that knows the labels of the whole step, as a Trainer's does."""
    loss: torch.Tensor = model(**micro_batch | {"num_items_in_batch": torch.tensor(40)}).loss
    return loss


def partly_labelled(mesh: DeviceMesh | None) -> list[float]:
    cut = CASES["llama"].micro_batches(3, length=24)
    cut[1]["labels"][:] = IGNORED
    with wrap(CASES["llama"], budget(None), mesh=mesh, loss_fn=loss_of_piece) as engine:
        stats = engine.step([as_micro_batch(batch, summed) for batch in cut], loss_weights=[1.0] * 3)
        return [stats.loss, stats.grad_norm]


def test_a_micro_batch_without_labels_counts_nothing_where_losses_know_those_of_the_step() -> None:
    wanted = partly_labelled(None)
    for found in sharing(2, partly_labelled):
        assert found == pytest.approx(wanted, rel=1e-5)


def followed(mesh: DeviceMesh) -> None:
    wrap(CASES["llama"], budget(None), mesh=mesh, replan=True).close()


REFUSALS: tuple[tuple[Callable[..., None], str | None, str, str], ...] = (
    *((attempted, what, "ModelError", said) for what, (_, said) in REFUSED.items()),
    (classifying, None, "ModelError", "LlamaForSequenceClassification does not take token ids"),
    (beside_a_table, None, "ModelError", r"'model.layers.1.mlp' \(Table\) does not compute in bf16"),
    *((given_otherwise, what, "", said) for what, said in UNCUT.items()),
    (followed, None, "ConfigError", "replan=True, and nothing is predicted here"),
)
"""Of each: what does it, of which kind, the error's kind (any: nothing) and its words."""


def refused(mesh: DeviceMesh, number: int) -> None:
    act, what, _, _ = REFUSALS[number]
    act(mesh, *([] if what is None else [what]))


def test_what_ranks_cannot_share_or_cut_or_follow_is_refused_by_name() -> None:
    found = sharing(2, refusals, refused, [{"number": number} for number in range(len(REFUSALS))])
    for (kind, said), (_, what, wanted, words) in zip(own_refusals(found), REFUSALS, strict=True):
        assert kind in (wanted or kind), what
        assert re.search(words, said), what

"""Which labels a loss is the mean over is found out from the model, so that every step is an exact mean over them."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.engine import batch
from penstock.engine.labels import IGNORED, LabelCount
from penstock.errors import ModelError
from penstock.loss.tiled import tiled_loss
from penstock.ranks.group import ALONE, Ranks
from tests.models import MODELS, VOCABULARY, Case, MicroBatch
from tests.ranks.worlds import World
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
entropy = nn.functional.cross_entropy


class Reader(nn.Module):
    """Logits [rows, tokens, vocabulary] of tokens, and what ``loss`` makes of them and labels."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.loss = loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.loss(self.head(x), labels)


def aligned(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return entropy(logits.flatten(0, 1), labels.flatten())


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def padded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that shifts as transformers does: with one label more, which is ignored."""
    return aligned(logits, nn.functional.pad(labels, (0, 1), value=-100)[:, 1:])


def by_nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels.flatten())


def masked_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return each.sum() / (labels[:, 1:] != -100).sum()


def beside_another(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss with one of something else beside it, as that of a codebook."""
    return shifted(logits, labels) + 0.0 * entropy(logits[0, :2], torch.tensor([1, 2]))


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 50


def own(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss by none of torch's losses."""
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(chosen * (labels != -100)).sum() / (labels != -100).sum()


def other_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return entropy(logits.flatten(0, 1), (labels.clamp(min=0) // 2).flatten())


def case(loss: Loss) -> Case:
    return Case(
        build=lambda: Reader(loss), micro_batch=MODELS["llama"].micro_batch, blocks=2, loss_fn=lambda m, mb: m(**mb)
    )


def rows(lengths: tuple[int, ...], tokens: int, *, first: bool, seed: int) -> MicroBatch:
    """A row of ``tokens`` for each length, of which as many count. ``first``: whether a row's first label does."""
    ids = torch.randint(2, VOCABULARY, (len(lengths), tokens), generator=torch.Generator().manual_seed(seed))
    labels = ids.masked_fill(torch.arange(tokens) >= torch.tensor(lengths).unsqueeze(1), -100)
    if not first:
        labels[:, 0] = -100
    return {"input_ids": ids, "labels": labels}


def micro_batches(*, first: bool) -> list[MicroBatch]:
    return [rows((12, 5), 12, first=first, seed=1), rows((8, 3, 2), 8, first=first, seed=2)]


def whole(model: nn.Module, mbs: list[MicroBatch], counts: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The mean over all labels that count, each of which is looked at alone."""
    total, items = 0.0, 0
    for mb in mbs:
        for r, t in counts(mb["labels"]).nonzero().tolist():
            alone = torch.full_like(mb["labels"], -100)
            alone[r, t] = mb["labels"][r, t]
            total += float(model(mb["input_ids"], alone).detach())
            items += 1
    return total / items


@pytest.mark.parametrize("loss", [aligned, shifted, padded, by_nll, masked_mean, beside_another])
def test_a_step_is_the_mean_over_all_labels_that_the_loss_counts(loss: Loss, tmp_path: Path) -> None:
    """Of what is prepared for no label counts, and in the first step no row's first label does, so that neither shows
    whether the model would look at it."""
    of = case(loss)
    counted = (lambda labels: labels != -100) if loss in (aligned, by_nll) else _but_first
    with wrap(of, budget(tmp_path / "store"), optimizer=penstock.SGD(lr=0.0)) as engine:
        engine.prepare([mb | {"labels": torch.full_like(mb["labels"], -100)} for mb in micro_batches(first=True)])
        for first in (False, True):
            stats = engine.step(micro_batches(first=first))
            assert stats.loss == pytest.approx(whole(of.model(), micro_batches(first=first), counted), rel=1e-6)
            assert stats.labels == ("all" if loss in (aligned, by_nll) else "but the first")
        assert engine.evaluate(micro_batches(first=True)) == pytest.approx(stats.loss, rel=1e-6)


def _but_first(labels: torch.Tensor) -> torch.Tensor:
    found = labels != -100
    found[:, 0] = False
    return found


@pytest.mark.parametrize(
    ("loss", "says"),
    [(summed, "a sum over labels"), (own, "none of torch's losses"), (other_labels, "not the micro-batch's labels")],
)
def test_what_cannot_be_found_out_is_an_error_with_a_way_out(loss: Loss, says: str, tmp_path: Path) -> None:
    of = case(loss)
    with wrap(of, budget(tmp_path / "store"), optimizer=penstock.SGD(lr=0.0)) as engine:
        for use in (engine.step, engine.evaluate):
            with pytest.raises(ModelError, match=rf"{says}.*loss_weights=\[\.\.\.\]"):
                use(micro_batches(first=True))
        alone = engine.step(micro_batches(first=True)[:1])  # there is nothing to weigh
        assert engine.step(micro_batches(first=True), loss_weights=[1.0, 1.0]).labels is None
        model = of.model()
        assert alone.loss == pytest.approx(float(model(**micro_batches(first=True)[0]).detach()), rel=1e-6)


def padded_by_zeros(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


def shifted_and_padded_by_zeros(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return padded_by_zeros(logits[:, :-1], labels[:, 1:])


@pytest.mark.parametrize("first", ["without padding", "with padding"])
@pytest.mark.parametrize("loss", [padded_by_zeros, shifted_and_padded_by_zeros])
def test_labels_that_the_loss_is_told_to_ignore_do_not_count(loss: Loss, first: str) -> None:
    """With such labels in the micro-batch that it is found out from, and without."""
    of = case(loss)
    with_padding = [mb | {"labels": mb["labels"].clamp(min=0)} for mb in micro_batches(first=True)]
    without = [mb | {"labels": mb["input_ids"].clone()} for mb in with_padding]

    def mean(mbs: list[MicroBatch]) -> float:
        model, counts = of.model(), [(mb["labels"] if loss is padded_by_zeros else mb["labels"][:, 1:]) for mb in mbs]
        items = [int((labels != 0).sum()) for labels in counts]
        each = [n * float(model(**mb).detach()) for n, mb in zip(items, mbs, strict=True)]
        return sum(each) / sum(items)

    with wrap(of, budget(None), optimizer=penstock.SGD(lr=0.0), plan=None) as engine:
        engine.prepare(without if first == "without padding" else with_padding)
        for mbs in (without, with_padding):
            assert engine.step(mbs).loss == pytest.approx(mean(mbs), rel=1e-6)


def over_positions(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over all positions, which is one over labels as long as each has one."""
    return entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").mean()


def over_positions_shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return over_positions(logits[:, :-1], labels[:, 1:])


def clamped_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A mean over labels by a mask of its own, whose targets are other ones where none counts."""
    each = entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return (each * (labels != -100).flatten()).sum() / (labels != -100).sum()


def all_counted(*, telling: bool = False) -> list[MicroBatch]:
    """Micro-batches of which each position has a label, or but one label of the first one's."""
    mbs = [mb | {"labels": mb["input_ids"].clone()} for mb in micro_batches(first=True)]
    if telling:
        mbs[0]["labels"][1, 4:] = -100
    return mbs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("when", ["first step", "later step", "evaluation", "prepared"])
@pytest.mark.parametrize("loss", [over_positions, over_positions_shifted, masked_mean, clamped_mean])
def test_a_mean_over_positions_is_never_taken_for_one_over_labels(loss: Loss, when: str) -> None:
    of, is_mean = case(loss), loss in (masked_mean, clamped_mean)
    counted = _but_first if loss is masked_mean else lambda labels: labels != -100
    hidden = all_counted(telling=True)
    mbs = [hidden[0], hidden[0] | {"labels": hidden[0]["input_ids"]}, hidden[1]]  # of one shape the last is probed
    with wrap(of, budget(None), optimizer=penstock.SGD(lr=0.0), plan=None) as engine:
        if when == "prepared":
            engine.prepare(all_counted())
        elif when != "first step":
            assert engine.step(all_counted()).labels is not None
        for use in [engine.evaluate, engine.step] if when == "evaluation" else [engine.step, engine.evaluate]:
            if is_mean:
                found = use(mbs)
                found = found if isinstance(found, float) else found.loss
                assert found == pytest.approx(whole(of.model(), mbs, counted), rel=1e-6)
            else:
                with pytest.raises(ModelError, match=r"could not be found out.*loss_weights=\[\.\.\.\]"):
                    use(mbs)
        assert not engine.inside.planning.labels.unsure
        engine.step(mbs, loss_weights=[1 / 3] * 3)


def test_a_look_at_labels_changes_no_plan_and_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with wrap(case(masked_mean), budget(None), plan=None) as engine:
        engine.step(all_counted())
        plan, looks = engine.plan, []
        monkeypatch.setattr(LabelCount, "learn", spy(LabelCount.learn, looks))
        for telling in (False, True, True, False):
            engine.step(all_counted(telling=telling))
            assert engine.plan is plan
        assert len(looks) == 1


def spy(learn: Callable[..., None], looks: list[float | None]) -> Callable[..., None]:
    def spied(count: LabelCount, micro_batch: MicroBatch, seen: Any, loss: float | None) -> None:
        looks.append(loss)
        learn(count, micro_batch, seen, loss)

    return spied


class Masked(Reader):
    """A reader whose loss counts by a mask of its own, and not by labels."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        each = entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return (each * loss_mask.flatten()).sum() / loss_mask.sum()


def test_a_mask_that_labels_know_nothing_of_is_looked_at_as_well() -> None:
    of = replace(case(aligned), build=lambda: Masked(aligned))
    mbs = [mb | {"loss_mask": torch.ones_like(mb["labels"])} for mb in all_counted()]
    with wrap(of, budget(None), optimizer=penstock.SGD(lr=0.0), plan=None) as engine:
        engine.step(mbs)
        mbs[1]["loss_mask"] = mbs[1]["loss_mask"].clone()
        mbs[1]["loss_mask"][:, 3:] = 0
        with pytest.raises(ModelError, match=r"a sum over labels.*loss_weights=\[\.\.\.\]"):
            engine.step(mbs)


@pytest.mark.parametrize(("loss", "found"), [(over_positions, None), (masked_mean, "but the first")])
def test_a_rank_whose_micro_batches_tell_tells_the_others(loss: Loss, found: str | None) -> None:
    """And none is left behind: all come to look."""
    both = World(2, told_by_the_last, loss).outcomes()
    assert both == [found, found]


def told_by_the_last(mesh: DeviceMesh, loss: Loss) -> str | None:
    with wrap(case(loss), budget(None), optimizer=penstock.SGD(lr=0.0), plan=None, mesh=mesh) as engine:
        engine.step(all_counted())
        labels = engine.inside.planning.labels
        assert labels.unsure
        mbs = all_counted(telling=mesh.get_rank() == 1)
        if loss is masked_mean:
            engine.step(mbs)
        else:
            with pytest.raises(ModelError, match=r"a sum over labels.*loss_weights=\[\.\.\.\]"):
                engine.step(mbs)
        assert not labels.unsure
        return labels.known


@pytest.mark.parametrize("first", ["telling", "not telling"])
def test_a_loss_that_was_found_to_be_no_mean_is_not_taken_for_one_later(first: str) -> None:
    mbs = [all_counted(telling=True)[0], all_counted()[1]]
    with wrap(case(over_positions), budget(None), optimizer=penstock.SGD(lr=0.0), plan=None) as engine:
        for alone in mbs if first == "telling" else reversed(mbs):
            engine.prepare([alone])
        for _ in range(2):
            with pytest.raises(ModelError, match="a sum over labels"):
                engine.step(mbs)


def test_labels_of_which_none_shows_whether_the_first_counts_are_an_error_with_a_way_out() -> None:
    hidden = [mb | {"labels": mb["labels"].clamp(min=0)} for mb in micro_batches(first=True)]
    for mb in hidden:
        mb["labels"][:, 0] = 0
    with wrap(case(padded_by_zeros), budget(None), optimizer=penstock.SGD(lr=0.0), plan=None) as engine:
        with pytest.raises(ModelError, match=r"ignore_index=0.*loss_weights=\[\.\.\.\]"):
            engine.step(hidden)
        engine.step(hidden, loss_weights=[0.5, 0.5])


def test_a_sum_that_knows_the_steps_labels_is_refused_without_weights(tmp_path: Path) -> None:
    """Divided by all labels of the step, it would be divided once more by their share."""
    llama = MODELS["llama"]

    def run(model: nn.Module, mb: Mapping[str, Any]) -> torch.Tensor:
        """In a step of one micro-batch, as here the first is, that is its mean."""
        loss: torch.Tensor = model(**mb, num_items_in_batch=torch.tensor(22)).loss
        return loss

    refused = pytest.raises(ModelError, match="num_items_in_batch")
    with wrap(replace(llama, loss_fn=run), budget(tmp_path / "store")) as engine:
        engine.step(llama.micro_batches(1))
        with refused:
            engine.step(llama.micro_batches(2))


def test_the_loss_in_tiles_is_seen_as_well(tmp_path: Path) -> None:
    llama = MODELS["llama"]
    found = []
    for name, loss_fn in (("plain", llama.loss_fn), ("tiles", tiled_loss(4))):
        with wrap(replace(llama, loss_fn=loss_fn), budget(tmp_path / name)) as engine:
            stats = engine.step([llama.micro_batches(1, length=n)[0] for n in (12, 8)])
        found.append((stats.labels, round(stats.loss, 5)))
    assert found[0] == found[1]
    assert found[0][0] == "but the first"


@pytest.mark.parametrize("mean", [True, False])
def test_connectionist_losses_count_rows_where_they_are_means(mean: bool) -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        lengths = (labels != -100).sum(1)
        times = torch.full((len(labels),), logits.shape[1])
        scores = logits.log_softmax(-1).transpose(0, 1)
        reduction = "mean" if mean else "sum"
        return nn.functional.ctc_loss(scores, labels.clamp(min=0), times, lengths, reduction=reduction)

    mbs = [mb | {"labels": mb["labels"][:, :3]} for mb in micro_batches(first=True)]
    of = case(loss)
    with wrap(of, budget(None), optimizer=penstock.SGD(lr=0.0), plan=None) as engine:
        if not mean:
            with pytest.raises(ModelError, match="ctc_loss_reduction"):
                engine.step(mbs)
            return
        model, count = of.model(), [len(mb["labels"]) for mb in mbs]
        each = [n * float(model(**mb).detach()) for n, mb in zip(count, mbs, strict=True)]
        assert engine.step(mbs).loss == pytest.approx(sum(each) / sum(count), rel=1e-6)


def test_labels_that_are_no_rows_of_ids_need_no_finding_out() -> None:
    count = LabelCount()
    assert count.items({"x": torch.ones(2)}) is None
    assert count.items({"labels": torch.ones(3, 4)}) == 3
    assert count.items({"labels": torch.tensor([1, -100, 2])}) == 2
    assert count.items({"labels": torch.tensor(1.0)}) == 1


class Two(Ranks):
    """One of two ranks, that says nothing."""

    size = 2


@pytest.mark.parametrize(("ranks", "said"), [(ALONE, "step$"), (Two(), "step, and as many on every other rank$")])
def test_who_leaves_out_a_micro_batch_without_labels_is_told_what_all_ranks_need(ranks: Ranks, said: str) -> None:
    """As many on each."""
    micro_batches = [{"labels": torch.full((2, 8), IGNORED)}]
    count = LabelCount()
    count.known = "but the first"
    for weights in (
        lambda: batch.given_weights(micro_batches, None, ranks),
        lambda: count.weights(micro_batches, ranks),
    ):
        with pytest.raises(ModelError, match=f"micro-batch 0 has no label that counts.*: leave it out of the {said}"):
            weights()


@pytest.mark.parametrize(
    ("loss", "dtype", "like_ignored"),
    [
        (padded, torch.uint8, 156),
        (padded, torch.uint16, 65436),
        (padded, torch.int16, 156),
        (aligned, torch.uint8, 156),
    ],
)
def test_a_label_in_a_narrow_dtype_is_never_taken_for_the_one_that_does_not_count(
    loss: Loss, dtype: torch.dtype, like_ignored: int
) -> None:
    """A step has the numbers of the same labels in int64, also of a label whose bits in the dtype are those of -100."""
    torch.manual_seed(0)
    model = Reader(loss)
    model.embed, model.head = nn.Embedding(like_ignored + 1, WIDTH), nn.Linear(WIDTH, like_ignored + 1)
    ids = torch.randint(0, 100, (3, 2, 8))
    ids[0, :, 2:] = like_ignored
    whole = [{"input_ids": one, "labels": one} for one in ids]
    narrow = [{name: value.to(dtype) for name, value in micro_batch.items()} for micro_batch in whole]
    found = []
    for steps in (whole, narrow):
        with penstock.wrap(
            copy.deepcopy(model),
            optimizer=penstock.SGD(lr=0.1),
            budget=budget(None),
            loss_fn=lambda model, micro_batch: model(**micro_batch),
            device="cpu",
        ) as engine:
            found.append((engine.step(steps).loss, engine.step([*steps, steps[0]]).loss))
    assert found[0] == found[1]

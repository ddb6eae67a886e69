"""Packing, cutting and order: nothing is lost that is not counted, and order is a function of the seed."""

import time
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from penstock.data.batches import HeldOut
from penstock.data.mixture import Mixture
from penstock.data.packing import best_fit_decreasing
from penstock.data.pieces import Pieces, continuous_pieces, pieces_of
from penstock.data.stream import Prepared
from penstock.data.token_files import TokenFile
from penstock.engine.batch import covers, shapes
from penstock.engine.labels import LabelCount
from penstock.errors import ConfigError
from tests.data_documents import batches_of


def _corpus(sizes: list[int], answers: bool = False, seed: int = 0) -> TokenFile:
    """Documents of these sizes; each token has an id of its own."""
    total = sum(sizes)
    counts = np.random.default_rng(seed).integers(0, 2, total).astype(np.uint8) if answers else None
    return TokenFile(ids=np.arange(total, dtype=np.uint32), ends=np.cumsum(sizes, dtype=np.int64), answers=counts)


def _best_fit_slowly(sizes: list[int], length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        room = [length - sum(sizes[i] for i in row) for row in rows]
        fits = [n for n in range(len(rows)) if room[n] >= sizes[piece]]
        if fits:
            rows[min(fits, key=lambda n: room[n])].append(piece)
        else:
            rows.append([piece])
    return rows


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=60))
@trials(max_examples=150, deadline=None)
def test_packing_is_best_fit_decreasing(sizes: list[int]) -> None:
    """Each piece once, none beyond its row, and as many rows and as much room as by the definition."""
    order, ends = best_fit_decreasing(np.array(sizes), 20)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    filled = sorted(sum(sizes[i] for i in row) for row in np.split(order, ends[:-1]))
    assert filled == sorted(sum(sizes[i] for i in row) for row in _best_fit_slowly(sizes, 20))
    assert max(filled) <= 20


def test_a_million_documents_are_packed_in_seconds() -> None:
    """A fifth of them in a fifth of the time: what it takes grows with their number alone, but for sorting."""
    sizes = np.random.default_rng(0).lognormal(6, 1, 200_000).astype(np.int64).clip(1, 4096)
    began = time.process_time()
    order, ends = best_fit_decreasing(sizes, 4096)
    assert time.process_time() - began < 3  # 0.4 s where nothing else runs
    assert len(order) == 200_000
    assert len(ends) * 4096 < 1.01 * sizes.sum()


@pytest.mark.parametrize(
    ("rule", "want", "lost"),
    [
        ("split", [(0, 5), (5, 10), (10, 12), (12, 15), (16, 21)], 0),
        ("cut", [(0, 5), (12, 15), (16, 21)], 8),
        ("drop", [(12, 15)], 18),
    ],
)
def test_documents_that_are_too_long_are_cut_as_asked_and_counted(
    rule: Any, want: list[tuple[int, int]], lost: int
) -> None:
    found = pieces_of(_corpus([12, 3, 1, 6]), 5, rule)
    assert list(zip(found.first.tolist(), found.end.tolist(), strict=True)) == want
    assert (found.cuts.too_long, found.cuts.lost, found.cuts.documents) == (2, lost, 4)
    assert found.cuts.labels == sum(end - first - 1 for first, end in want)
    assert found.cuts.without == (1 if rule != "split" else 2), "one token predicts nothing"


def test_text_is_split_and_what_has_answers_is_cut() -> None:
    assert len(pieces_of(_corpus([12]), 5, None)) == 3
    assert len(pieces_of(_corpus([12], answers=True), 5, None)) == 1


@pytest.mark.parametrize("make", [lambda c: pieces_of(c, 7, "split"), lambda c: continuous_pieces(c, 7)])
def test_pieces_without_a_label_that_counts_are_left_out(make: Any) -> None:
    corpus = _corpus(np.random.default_rng(1).integers(1, 20, 200).tolist(), answers=True, seed=2)
    found: Pieces = make(replace(corpus, answers=(corpus.answers * (corpus.ids % 5 == 0)).astype(np.uint8)))
    assert found.corpus.answers is not None
    labels = [int(found.corpus.answers[a + 1 : b].sum()) for a, b in zip(found.first, found.end, strict=True)]
    assert min(labels) > 0
    assert sum(labels) == found.cuts.labels
    assert found.cuts.without > 0


def _batches(
    pieces: list[Pieces], packing: Any, *, seed: int | None = 3, weights: Any = None, length: int = 16, **changes: Any
) -> Any:
    stream = Prepared(mixture=Mixture(sources=pieces, weights=weights, seed=seed), packing=packing, length=length)
    return batches_of(stream, packing, length, **changes)


SIZES = np.random.default_rng(5).integers(2, 30, 120).tolist()


@pytest.mark.parametrize("packing", [True, False, "continuous"])
def test_an_epoch_has_every_token_once_and_the_next_another_order(packing: Any) -> None:
    corpus = _corpus(SIZES)
    pieces = continuous_pieces(corpus, 16) if packing == "continuous" else pieces_of(corpus, 16, None)
    batches = _batches([pieces], packing)
    assert isinstance(batches.stream, Prepared)
    orders = []
    rows = batches.stream.rows(None)
    for epoch in range(2):
        taken = [row for row, _ in islice(rows, len(batches.stream.epoch(epoch)))]
        orders.append(np.concatenate([row.ids for row in taken]).tolist())
        assert all(len(row.ids) <= 16 for row in taken)
    want = sorted(int(i) for a, b in zip(pieces.first, pieces.end, strict=True) for i in range(a, b))
    assert sorted(orders[0]) == sorted(orders[1]) == want
    assert orders[0] != orders[1]


def test_a_step_depends_on_the_seed_and_the_position_alone() -> None:
    pieces = [pieces_of(_corpus(SIZES), 16, None)]
    walked = list(islice(_batches(pieces, True).steps(), 80))
    assert walked[-1].position["epoch"] > 1
    for number in (0, 7, 40):
        (jumped,) = islice(_batches(pieces, True).steps(walked[number].position), 1)
        assert _equal(jumped.micro_batches, walked[number + 1].micro_batches)
        assert jumped.position == walked[number + 1].position
    (other,) = islice(_batches(pieces, True, seed=4).steps(), 1)
    assert not _equal(other.micro_batches, walked[0].micro_batches)


def test_a_position_counts_sequences_whatever_the_batch() -> None:
    pieces = [pieces_of(_corpus(SIZES), 16, None)]
    small = list(islice(_batches(pieces, True, sequences_per_step=2, micro_batch_size=1).steps(), 12))
    (large,) = islice(_batches(pieces, True, sequences_per_step=6, micro_batch_size=3).steps(small[2].position), 1)
    want = [mb["input_ids"] for step in small[3:6] for mb in step.micro_batches]
    assert torch.equal(torch.cat([mb["input_ids"] for mb in large.micro_batches]), torch.cat(want))
    assert large.position == small[5].position


def _equal(a: Any, b: Any) -> bool:
    return all(set(x) == set(y) and all(torch.equal(x[name], y[name]) for name in x) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("packing", [True, False, "continuous"])
def test_the_engine_counts_the_labels_that_the_data_count(packing: Any) -> None:
    """What a mean is weighted with is the number of labels, after the shift that the model does itself."""
    count = LabelCount()
    count.known = "but the first"
    corpus = _corpus(SIZES, answers=True)
    pieces = continuous_pieces(corpus, 16) if packing == "continuous" else pieces_of(corpus, 16, "split")
    for step in islice(_batches([pieces], packing).steps(), 30):
        counts = [count.items(mb) for mb in step.micro_batches]
        assert all(counts)
        assert sum(c for c in counts if c) == step.labels
    epoch = list(_batches([pieces], packing, kind=HeldOut).once())
    assert sum(step.labels for step in epoch) == pieces.cuts.labels


def test_no_label_is_predicted_from_the_document_before() -> None:
    """Ids are places in the corpus, so a label may only follow its own predecessor."""
    corpus = _corpus(SIZES)
    for step in islice(_batches([pieces_of(corpus, 16, None)], True).steps(), 20):
        for mb in step.micro_batches:
            ids, labels, positions = mb["input_ids"], mb["labels"], mb["position_ids"]
            counts = labels[:, 1:] != -100
            assert (labels[:, 1:][counts] == ids[:, :-1][counts] + 1).all()
            assert not np.isin(labels[labels != -100].numpy(), np.concatenate([[0], corpus.ends[:-1]])).any()
            begins = positions == 0
            assert ((positions[:, 1:] == positions[:, :-1] + 1) | begins[:, 1:]).all()
            assert begins[:, 0].all()
            assert begins[:, 1:].any(dim=1).all(), "every row looks packed, a full one too"


def test_weights_are_shares_of_the_tokens() -> None:
    small, large = pieces_of(_corpus([8] * 20), 16, None), pieces_of(_corpus([4, 12] * 300), 16, None)
    mixture = Mixture(sources=[small, large], weights=[3.0, 1.0], seed=1)
    tokens = np.zeros(2)
    seen: list[int] = []
    for epoch in range(4):
        source, piece = mixture.epoch(epoch)
        for number, pieces in enumerate((small, large)):
            mine = piece[source == number]
            tokens[number] += (pieces.end - pieces.first)[mine].sum()
        seen += piece[source == 0].tolist()
    assert tokens[0] / tokens.sum() == pytest.approx(0.75, abs=0.01)
    assert tokens.sum() == pytest.approx(4 * (small.cuts.tokens + large.cuts.tokens), rel=0.01)
    counts = np.bincount(seen)
    assert counts.max() - counts.min() <= 1, "a source is read pass by pass"
    assert mixture.passes(4)[0] == pytest.approx(counts.mean(), abs=1)


def test_too_few_sequences_for_a_micro_batch_are_refused_unless_they_are_held_out() -> None:
    pieces = [pieces_of(_corpus([10, 10]), 16, None)]
    with pytest.raises(ConfigError, match=r"the data are 2 sequences of 16 tokens \(20 tokens\): too few for one"):
        _batches(pieces, True, micro_batch_size=3)
    (step,) = _batches(pieces, True, micro_batch_size=3, kind=HeldOut).once()
    assert [len(mb["input_ids"]) for mb in step.micro_batches] == [2]


@pytest.mark.parametrize("packing", [True, False, "continuous"])
def test_a_plan_for_the_largest_micro_batches_has_room_for_those_of_every_epoch(packing: Any) -> None:
    """Padded ones have masks that hide something; by weight, the longest document may be in a later epoch only."""
    short, long = _corpus([4, 6, 7, 5, 9] * 4), _corpus([8] * 30 + [20])
    pieces = [continuous_pieces(c, 24) if packing == "continuous" else pieces_of(c, 24, None) for c in (short, long)]
    for seed in range(4):
        batches = _batches(pieces, packing, seed=seed, weights=[9.0, 1.0], length=24, sequences_per_step=5)
        planned = [shapes(mb) for mb in batches.largest()]
        for step in islice(batches.steps(), 100):
            for mb in step.micro_batches:
                assert any(covers(room, shapes(mb)) for room in planned)


def test_an_epoch_is_its_own_whoever_asks_for_another_meanwhile() -> None:
    class Meanwhile(Prepared):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_last" and value is not None and value[0] == 1:
                self.epoch(0)  # as another thread might just then

    mixture = Mixture(sources=[pieces_of(_corpus(SIZES), 16, None)], weights=None, seed=3)
    epochs = [kind(mixture=mixture, packing=True, length=16).epoch(1).piece for kind in (Prepared, Meanwhile)]
    assert epochs[0].tolist() == epochs[1].tolist()

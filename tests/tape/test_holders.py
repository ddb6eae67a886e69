"""The search for places in which a model keeps tensors, and for those in what blocks are handed."""

import queue
import types

import torch

from penstock.tape.holders import Search, along, places_handed


def test_a_search_is_short_whatever_there_is() -> None:
    vocabulary = {i: i for i in range(100_000)}
    kept = [torch.ones(1)]
    found = list(Search([], [], lambda: (vocabulary, kept)))
    assert [tensor is kept[0] for tensor, _ in found] == [True]


def test_a_search_takes_long_chains_of_objects() -> None:
    last = first = types.SimpleNamespace()
    for _ in range(1500):  # more than Python calls within each other
        last.next = last = types.SimpleNamespace(held=torch.ones(1))
    *_, (tensor, way) = Search([], [], lambda: first)
    (*_, place) = along(way)
    assert tensor is last.held is place.now()
    place.put(None)
    assert hash(place)
    assert last.held is None


def test_what_other_threads_change_is_none() -> None:
    waiting: queue.Queue[int] = queue.Queue()
    assert [place.of for place, _ in places_handed([types.SimpleNamespace(waiting=waiting)])] == [{"waiting": waiting}]

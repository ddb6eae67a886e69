"""The search for places in which a model keeps tensors, and for those in what blocks are handed."""

import queue
import types
from collections import OrderedDict

import torch

from penstock.tape.code import reached
from penstock.tape.holders import Search, along, places_handed
from penstock.tape.places import Entries


def test_a_search_is_short_whatever_there_is() -> None:
    vocabulary = {i: i for i in range(100_000)}
    kept = [torch.ones(1)]
    found = list(Search([], [], lambda: (vocabulary, kept)))
    assert [tensor is kept[0] for tensor, _ in found] == [True]


def test_no_search_goes_through_pytest_to_which_asserts_of_tests_refer() -> None:
    """It rewrites them, and has all that there is of a run: to go through it takes seconds."""

    def asserts(x: object = None) -> None:
        assert x is None

    functions, classes = reached((), [asserts])
    assert functions == [asserts]
    assert classes == []


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


def test_no_code_of_a_models_own_classes_is_run() -> None:
    """Nor does it hide what they hold: a metaclass or a list may say anything of itself."""

    def never(*_: object) -> None:
        raise AssertionError

    meta = type("Meta", (type,), {"__eq__": never, "__hash__": never, "__setattr__": never, "__instancecheck__": never})
    kind = meta("Kind", (), {"kept": torch.ones(1)})
    of_list = dict.fromkeys(("__iter__", "__len__", "__getitem__", "__eq__", "clear", "extend"), never)
    own_list = type("OwnList", (list,), of_list)()
    list.append(own_list, torch.ones(1))
    of_tuple = dict.fromkeys(("__iter__", "__len__", "__getitem__"), never)
    own_tuple = type("OwnTuple", (tuple,), of_tuple)((torch.ones(1),))
    found = list(Search([], [], lambda: (kind, own_list, own_tuple)))
    tensors = [vars(kind)["kept"], list.__getitem__(own_list, 0), tuple.__getitem__(own_tuple, 0)]
    assert {id(tensor) for tensor, _ in found} == {id(tensor) for tensor in tensors}
    places = {place for _, way in found for place in along(way)}
    values = [(place, place.now()) for place in places]
    for place, value in values:
        place.put(value)
    list.append(own_list, 0)
    for place, value in values:
        place.put(value)
    assert list.__len__(own_list) == 1


def test_a_dict_of_a_class_of_ones_own_is_not_asked_for_its_values() -> None:
    """As that of transformers' activations, which makes one anew whenever it is asked."""

    class Making(OrderedDict[str, object]):
        def __getitem__(self, key: str) -> object:
            raise AssertionError

    made = Making(one=1)
    assert next(place.now() for place, _ in places_handed([made]) if isinstance(place, Entries)) == {"one": 1}

"""The longest sequence that is said to fit does, and no longer one."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.planner.longest import SHORTEST, Longest, longest
from penstock.planner.proposals import Proposals
from penstock.planner.task import Task
from penstock.shape.huggingface import HuggingFaceModel, model_shape
from tests.planner.test_search import MIB, task
from tests.questions import LLAMA

POSITIONS = 5220
CONFIG = LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": POSITIONS}


def asked(device: int) -> Task:
    return replace(task(device=device), shape=model_shape(CONFIG, kind="cpu", loss_tile=64))


def with_length(of: Task, tokens: int) -> bool:
    return Proposals(replace(of, sequence_length=tokens, profiles={}).question(1, 1)).fits()


@pytest.mark.parametrize("device", [6 * MIB, 12 * MIB])
def test_what_is_longer_does_not_fit(device: int) -> None:
    of = asked(device)
    found = longest(of)
    assert found is not None
    assert not found.all
    assert SHORTEST <= found.tokens < POSITIONS
    assert with_length(of, found.tokens)
    assert not with_length(of, found.tokens + 1)


def test_where_memory_is_plenty_the_models_positions_are_all() -> None:
    of = asked(1 << 30)
    assert longest(of) == Longest(tokens=POSITIONS, all=True)
    with pytest.raises(ConfigError, match="takes at most"):
        with_length(of, POSITIONS + 1)


@pytest.mark.parametrize("positions", [7, 300])
def test_a_model_of_few_positions_is_told_all_of_them(positions: int) -> None:
    of = replace(asked(1 << 30), shape=model_shape({**CONFIG, "max_position_embeddings": positions}, kind="cpu"))
    assert longest(of) == Longest(tokens=positions, all=True)


def test_too_little_for_any_is_said() -> None:
    assert longest(asked(MIB)) is None


def test_tiles_make_room_for_longer_ones() -> None:
    from penstock.hf.tiles import tiled_mlps

    whole = asked(12 * MIB)
    assert isinstance(whole.shape, HuggingFaceModel)
    tiled = replace(whole, shape=replace(whole.shape, change=lambda model: tiled_mlps(model, 128)))
    first = longest(whole)
    assert first is not None
    assert with_length(tiled, first.tokens * 3 // 2)

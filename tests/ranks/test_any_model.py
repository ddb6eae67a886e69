"""Models of any kind (``tests.any_model``) on several ranks, which share all state or are a pipeline: each has the bits
of one rank, which ``tests/engine/test_any_model.py`` holds beside a plain loop, or is refused. Three ranks have sums
that one has not: those of one op at a time.
"""

import random
import re
import shutil
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError, ModelError, RankError
from penstock.planner import fit
from tests.any_calls import CALLS
from tests.any_model import Spec, any_spec
from tests.any_ways import CHANGES, WAYS
from tests.conftest import Campaign
from tests.engine.test_any_model import (
    PLACES,
    WRITES,
    Setting,
    Untrainable,
    any_setting,
    built,
    case_of,
    goes_undetected,
    is_fair,
    refuse_what_torch_cannot,
)
from tests.ranks.test_bits import equal, whole_state
from tests.ranks.worlds import World
from tests.training import budget, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

SHARED = [where or {"weights": "disk"} for where in PLACES if "device" not in where.values()]
"""Places of what ranks share, which is not on a device."""
IN_TURN = ("1f1b", "interleaved-1f1b", "zero-bubble")

# -- what several ranks may refuse, and one does not ----------------------------------------------------------------

_BORROWS = {name for name in CHANGES if re.match("borrowed|tied|shared", name)}
_NO_GRADIENT = {
    *("cut", "detached", "half detached", "no_grad", "gradients switched off", "frozen", "half frozen"),
    *(name for name in CHANGES if name.startswith("frozen")),
}
_NOT_SPLIT = {
    *("functional_call", "derivative of weights", "derivative of weights by torch.func", "func.grad", "jvp"),
    *("vmap of weights", "functional.vjp", "a derivative", "linear twice", "penalised", "hooks of saved tensors"),
    *("dropout in a reentrant checkpoint", "dropout in a checkpoint"),
}
_NOT_PASSED_ON = (
    ({*CALLS} - {"plain", "named", "float"})
    | ({*WAYS} - {"in order", "backwards", "one left out"})
    | {"hooks", "backward hooks", "features", "shared buffer", "input asks for a gradient", *_BORROWS}
    | {"expanded", "only expanded"}
)
"""What is handed on from one block to the next other than as a single tensor, or is computed with in between."""

REFUSALS: tuple[tuple[str, set[str]], ...] = (
    ("the forward changes .* (each rank in its own way|each rank would have its own)", WRITES | {"looks back"}),
    (
        "changes its buffer .* each rank would have its own",
        WRITES | {"buffer that begins", "table", "registers a buffer"},
    ),
    ("in a pipeline parameters do not cross", _BORROWS | {"penalised", "inside of one"}),
    (r"Train with ranks that share all state \(without a pipeline\)", _NOT_PASSED_ON),
    ("calls none of the blocks that rank", {"one left out"}),
    ("runs the backward of blocks in two parts, and none", _NO_GRADIENT | _NOT_SPLIT),
    ("some have nothing that can be delayed", _NO_GRADIENT | {"one left out"}),
)
"""As in ``tests/engine/test_any_model.py``."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model that so many ranks train. ``axis``: of their mesh; ``spec``: with the micro-batches of all of them."""

    ranks: int
    axis: str
    spec: Spec
    setting: Setting
    strands: int

    def is_fair(self, said: str) -> bool:
        """True if the model has what a refusal names."""
        others = any(re.search(words, said) and why & self.spec.names() for words, why in REFUSALS)
        return others or is_fair(said, self.spec)


def any_case(seed: int, ranks: int, axis: str) -> Case:
    """A case for ranks of one kind; of pipelines most have blocks that hand on a tensor in a line."""
    drawn = random.Random(seed)
    spec, setting = any_spec(drawn), any_setting(drawn)
    how, where, sharing = dict(setting.how), drawn.choice(SHARED), 1 if axis == "pp" else ranks
    if where.get("state") == "host":
        how.pop("speculate", None)
    if axis != "pp":
        how["stage"] = drawn.choice((None, 0, 2, 3))
    elif drawn.random() < 0.5:
        how["schedule"] = "vertical"
    else:
        how = {**how, "schedule": drawn.choice(IN_TURN), "recompute": None}
        how.pop("delay", None)
    if axis == "pp" and drawn.random() < 0.9:
        call, way = drawn.choice(("plain", "plain", "named", "float")), drawn.choice(("in order", "backwards"))
        between = tuple((place, name) for place, name in spec.between if place == 99)
        spec = replace(spec, call=call, way=way, wrapped="nothing", between=between)
    return Case(
        ranks=ranks,
        axis=axis,
        spec=replace(spec, lengths=tuple(step * sharing for step in spec.lengths)),
        setting=replace(
            setting, how=how, where=where, weights=None if setting.weights is None else setting.weights * sharing
        ),
        strands=sharing * drawn.choice((1, 1, 2)),
    )


def oracle(case: Case) -> Case:
    """The same numbers, in memory and one op at a time."""
    return replace(case, setting=replace(case.setting, how={"overlap": False}, where={}))


# -- training -------------------------------------------------------------------------------------------------------


def trained(mesh: DeviceMesh | None, case: Case, folder: Path) -> dict[str, Any]:
    """What a rank has found and left, or without a mesh one that is alone."""
    spec, setting = case.spec, case.setting
    rank, size = (0, 1) if mesh is None or case.axis == "pp" else (mesh.get_rank(), mesh.size())
    where = budget(folder if setting.where else None, **setting.where)
    found: dict[str, Any] = {"losses": [], "norms": [], "evaluated": []}
    settings = {**setting.numbers, **setting.how, "mesh": mesh, "strands": case.strands}
    with wrap(case_of(spec), where, model=built(spec, setting), **settings) as engine:
        for micro_batches in spec.data():
            count = len(micro_batches)
            own = slice(rank * count // size, (rank + 1) * count // size)
            weights = None if setting.weights is None else setting.weights_of(count)[own]
            stats = engine.step(micro_batches[own], loss_weights=weights)
            found["losses"].append(stats.loss)
            found["norms"].append(stats.grad_norm)
            if setting.evaluates:
                found["evaluated"].append(engine.evaluate(micro_batches[own]))
        buffers = {name: tensor.clone() for name, tensor in engine.inside.resources.buffers.tensors().items()}
        return found | {
            "parameters": dict(engine.master_parameters()),
            "moments": whole_state(engine),
            "buffers": {} if case.axis == "pp" else buffers,
        }


def outcome(mesh: DeviceMesh | None, case: Case, folder: Path) -> Any:
    """``trained``, or kind and words of an error."""
    with pytest.MonkeyPatch.context() as patch:
        if case.setting.torch is not None:  # a chunk of int8 is longer
            patch.setattr(fit, "CHUNKS", (4096,))
        try:
            return trained(mesh, case, folder)
        except (ModelError, ConfigError, RankError) as error:
            return type(error).__name__, str(error)
        except Exception:  # noqa: BLE001  any other is a finding
            return "other", traceback.format_exc()


def outcomes(mesh: DeviceMesh, cases: Sequence[Case], folder: Path) -> list[Any]:
    """On a rank: ``outcome`` of one case after the other."""
    return [outcome(mesh, case, folder / str(number)) for number, case in enumerate(cases)]


def compare(case: Case, alone: Any, of_ranks: Sequence[Any]) -> bool:
    """True if ranks have trained the model.

    Raises:
        AssertionError: with other numbers than one that is ``alone``, or they have refused it for nothing.
    """
    said = [found for found in of_ranks if isinstance(found, tuple)]
    if said:
        reasons = [words for kind, words in said if kind in ("ModelError", "ConfigError")]
        assert len(said) == case.ranks, said
        assert reasons, said
        assert {kind for kind, _ in said} <= {"ModelError", "ConfigError", "RankError"}, said
        assert isinstance(alone, tuple) or all(map(case.is_fair, reasons)), said
        return False
    if isinstance(alone, tuple) or goes_undetected(
        case.spec
    ):  # what passes between micro-batches, of which a rank has one
        return False
    for found in of_ranks:
        equal(found, alone)
    return True


def alone(cases: Sequence[Case], folder: Path) -> list[Any]:
    """The outcome of one rank for each case, or where that has other sums, of the first of several."""
    folder.mkdir()
    if {(case.ranks, case.axis) for case in cases} == {(3, "dp_shard")}:
        found: list[Any] = World(3, outcomes, cases, folder).outcomes()[0]
        return found
    return [outcome(None, case, folder) for case in cases]


@pytest.mark.parametrize("axis", ["dp_shard", "pp"])
def test_a_model_of_any_kind_has_the_bits_of_one_rank_or_is_refused(
    axis: str, campaign: Campaign, tmp_path: Path
) -> None:
    trained, count, together = 0, campaign.cases(2, 800), 20
    for turn, first in enumerate(range(0, count, together)):
        ranks = 2 + (turn + (axis == "pp")) % 2
        cases = list[tuple[int, Case]]()
        for seed in range(first, min(first + together, count)):
            case = any_case(seed, ranks, axis)
            with suppress(Untrainable):
                refuse_what_torch_cannot(case.spec, built(case.spec, case.setting))
                cases.append((seed, case))
        wanted = alone([oracle(case) for _, case in cases], tmp_path / "alone")
        (folder := tmp_path / "ranks").mkdir()
        of_ranks = World(ranks, outcomes, [case for _, case in cases], folder, axis=axis).outcomes()
        for (seed, case), expected, *found in zip(cases, wanted, *of_ranks, strict=True):
            try:
                trained += compare(case, expected, found)
            except BaseException as error:
                error.add_note(f"seed {seed}: {case}")
                raise
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "alone")
    assert trained, "no model was trained"
    campaign.found(f"{trained} random models trained by 2 or 3 ranks ({axis}): all with the bits of one")

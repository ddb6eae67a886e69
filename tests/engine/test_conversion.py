"""A run goes on with its moments in another form: from its store and from a snapshot, with all else as it was; and
whatever breaks the conversion off, it goes on from what was there or from what was made of it.
"""

import errno
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

import penstock
from penstock.config.optimizer import Moments
from penstock.errors import StoreError
from penstock.store import making
from penstock.store.facts import facts_of
from penstock.store.manifest import Manifest
from tests.faults import Nth, error, intercepted
from tests.state.test_convert import CHANGES, Found, by_parameter, check_converted
from tests.training import Result, assert_same, budget, run_steps, state_of, wrap
from tests.unreached import ADAMW, Switches, steps_of
from tests.unreached import CASE as WITHOUT_BUFFER

pytestmark = pytest.mark.usefixtures("one_thread")


class Counting(Switches):
    """A model with a buffer that each micro-batch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, tokens: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(tokens.float().mean().to(self.mean.dtype), 0.1)
        return super().forward(tokens, **more)


CASE = replace(WITHOUT_BUFFER, build=Counting)
STEPS = steps_of("ftft")
"""A step that leaves out the tower passes its parameters over: what they have missed is counted."""
IN_MEMORY = budget(None, weights="host", state="host")


def opened(form: Moments, where: penstock.Budget, precision: str = "bf16") -> penstock.Engine:
    optimizer = replace(ADAMW, moments=form, overrides=(penstock.Override(match="second", lr=2e-2),))
    return wrap(CASE, where, optimizer=optimizer, precision=precision, clip_grad_norm=0.5, delay=0.0)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All that a run is."""

    parameters: Found
    progress: dict[str, Any]
    buffers: list[torch.Tensor]


def seen(engine: penstock.Engine) -> Seen:
    inside = engine.inside
    progress = inside.resources.progress
    record, named = progress.record(), {id(parameter): name for name, parameter in engine.model.named_parameters()}
    for mine, saved in zip(engine.optimizer.param_groups, record["param_groups"], strict=True):
        assert list(saved.pop("param_names")) == [named[id(parameter)] for parameter in mine["params"]]
    parameters, _ = by_parameter(inside.resources.description, [state_of(engine)])
    return Seen(
        parameters=parameters,
        progress=record | {"missed": dict(progress.missed)},
        buffers=[buffer.clone() for buffer in engine.model.buffers()],
    )


def check(before: Seen, after: Seen, form: Moments) -> None:
    check_converted(before.parameters, after.parameters, form)
    assert after.progress == before.progress
    assert all(map(torch.equal, before.buffers, after.buffers))


def begun(form: Moments, folder: Path, precision: str = "bf16", **places: Any) -> Seen:
    """A run of two steps in ``folder / "store"``, and its snapshot."""
    with opened(form, budget(folder / "store", **places), precision) as engine:
        for number, micro_batches in enumerate(STEPS[:2]):
            engine.step(micro_batches, position={"at": number})
        engine.save(folder / "snapshot")
        found = seen(engine)
    assert set(found.progress["missed"].values()) == {1}
    assert found.buffers[0].any()
    return found


@pytest.mark.sampled(1, values=False)
@pytest.mark.parametrize(
    ("precision", "places"),
    [("bf16", {}), ("fp32", {"slots": 1}), ("fp16", {"weights": "host", "state": "host"})],
    ids=str,
)
@pytest.mark.parametrize("change", CHANGES, ids="-".join)
def test_a_run_goes_on_in_another_form(
    change: tuple[Moments, Moments],
    places: dict[str, Any],
    precision: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says so once; from its store and from its snapshot it goes on with the same bits."""
    had, form = change
    before = begun(had, tmp_path, precision, **places)
    found: list[Result] = []
    for where in (budget(tmp_path / "store", **places), IN_MEMORY):
        caplog.clear()
        with opened(form, where, precision) as engine:
            if where is IN_MEMORY:
                engine.load(tmp_path / "snapshot")
            check(before, seen(engine), form)
            found.append(run_steps(engine, STEPS[2:]))
            after = seen(engine).parameters
        (said,) = [record.getMessage() for record in caplog.records if "converted" in record.getMessage()]
        assert f"moments are converted from {had} to {form}, " in said
    assert_same(*found)
    assert {path.name for path in (tmp_path / "store").iterdir()} <= OF_A_STORE
    caplog.clear()
    with opened(form, budget(tmp_path / "store", **places), precision) as engine:
        check_converted(after, seen(engine).parameters, "fp32")
    assert "converted" not in caplog.text


OF_A_STORE = {"commit.0", "commit.1", "lock", "manifest.json", "penstock.store", "scratch"}


def test_what_was_rounded_is_rounded_to_itself(tmp_path: Path) -> None:
    """A run in 8 bits that was in fp32 between two steps has the bits of one that was not."""
    begun("int8", tmp_path)
    copytree(tmp_path / "store", tmp_path / "other")
    with opened("int8", budget(tmp_path / "other")) as engine:
        undisturbed = run_steps(engine, STEPS[2:])
        wanted = seen(engine).parameters
    opened("fp32", budget(tmp_path / "store")).close()
    with opened("int8", budget(tmp_path / "store")) as engine:
        found = run_steps(engine, STEPS[2:])
        check_converted(wanted, seen(engine).parameters, "fp32")
    assert (found.losses, found.norms) == (undisturbed.losses, undisturbed.norms)


def test_a_store_keeps_its_owner_its_slots_and_its_stripe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with monkeypatch.context() as patch:
        patch.setattr("penstock.engine.resources.weights_for", lambda *_: (2, 1))
        with opened("fp32", budget(paths, slots=1)) as engine:
            run_steps(engine, STEPS[:1])
    before = [Manifest.read(path) for path in paths]
    opened("bf16", budget(paths, slots=1)).close()
    for had, now in zip(before, [Manifest.read(path) for path in paths], strict=True):
        assert (had.weights, had.directories, had.owner) == (now.weights, now.directories, now.owner)
        assert {extent.slots for extent in now.layout.extents} == {1}
        assert had.store != now.store
    facts = facts_of(paths)
    assert facts is not None
    assert [record and record["step"] for record in facts.records.values()] == [1, 1]  # whichever of them can be read


def test_what_differs_in_more_than_the_form_is_refused_and_left(tmp_path: Path) -> None:
    begun("fp32", tmp_path)
    before = contents(tmp_path / "store")
    other = {"optimizer": penstock.Lion(lr=1e-3, moments="int8"), "precision": "bf16"}
    with pytest.raises(StoreError, match="made for another model: optimizer"):
        wrap(CASE, budget(tmp_path / "store"), **other)
    with wrap(CASE, IN_MEMORY, **other) as engine, pytest.raises(StoreError, match="with another optimizer than"):
        engine.load(tmp_path / "snapshot")
    assert contents(tmp_path / "store") == before


def test_a_store_in_which_nothing_is_committed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(penstock.engine.start, "fill", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opened("fp32", budget(tmp_path))
    with opened("int8", budget(tmp_path)) as engine:
        run_steps(engine, STEPS[:1])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_without_room_for_both_it_says_so_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = begun("fp32", tmp_path)
    held = contents(tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(making.packed, "free_bytes", lambda path: 300_000)
        said = "moments are not converted, and the state is as it was: .* needs .* on this file system, .* are free"
        with pytest.raises(StoreError, match=said):
            opened("int8", budget(tmp_path / "store"))
    assert contents(tmp_path / "store").keys() == held.keys()
    with opened("fp32", budget(tmp_path / "store")) as engine:
        check(before, seen(engine), "fp32")


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    begun("fp32", tmp_path)
    held = contents(tmp_path / "store").keys()
    fails = Nth(3, error(errno.ENOSPC), lambda call: call.writes and call.path.endswith("staged/penstock.store"))
    with intercepted(tmp_path, fails), pytest.raises(StoreError, match=r"and the state is as it was: .*No space left"):
        opened("int8", budget(tmp_path / "store"))
    assert contents(tmp_path / "store").keys() == held

"""A snapshot of several ranks is one: whole or not there, taken over only whole and by the same run, of whatever number
of ranks, and what goes wrong on one rank is said on all, which go on.
"""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError, RankError, StoreError
from penstock.state import snapshots
from penstock.store import packed
from tests.faults import Call, Nth, error, intercepted
from tests.models import PLAIN
from tests.ranks.test_bits import equal, results
from tests.ranks.worlds import together
from tests.training import ADAMW, assert_same_state, budget, run_steps, state_of, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = PLAIN  # whose groups cannot be halved
HOW: dict[str, Any] = {"precision": "bf16", "clip_grad_norm": 0.92, "strands": 4}


def own(mesh: DeviceMesh | None, count: int, first: int = 1) -> list[Any]:
    """A rank's micro-batches of each step."""
    rank, share = (0, 4) if mesh is None else (mesh.get_rank(), 4 // mesh.size())
    steps = steps_of(CASE, count, first=first, lengths=(12, 8, 10, 12))
    return [micro_batches[rank * share : (rank + 1) * share] for micro_batches in steps]


def saved(mesh: DeviceMesh | None, path: Path, disk: Path | None = None) -> None:
    """A snapshot after two steps; with a disk their delayed chunks are pending then."""
    with wrap(CASE, budget(disk), mesh=mesh, **HOW, **({"delay": 0.5} if disk else {})) as engine:
        run_steps(engine, own(mesh, 2))
        engine.save(path)


def gone_on(mesh: DeviceMesh | None, *paths: Path, disk: Path | None = None) -> list[dict[str, Any]]:
    """What the step after each snapshot finds and leaves, each by the same engine; and this rank's arrays before."""
    with wrap(CASE, budget(disk), mesh=mesh, **HOW) as engine:
        found = []
        for path in paths:
            engine.load(path)
            arrays = state_of(engine)
            ran = run_steps(engine, own(mesh, 1, first=engine.step_count + 1))
            found.append(results(engine, ran) | {"own": arrays})
        return found


def saved_and_gone_on(mesh: DeviceMesh, folder: Path) -> list[dict[str, Any]]:
    saved(mesh, folder / "two", folder / "store")
    return gone_on(mesh, folder / "two", folder / "one", disk=folder / "other")


def test_any_number_of_ranks_goes_on_with_the_bits_of_one_process(tmp_path: Path) -> None:
    with wrap(CASE, budget(None), **HOW) as engine:
        run_steps(engine, own(None, 2))
        engine.save(tmp_path / "one")
        wanted = results(engine, run_steps(engine, own(None, 1, first=3)))
    for found in [*together(2, saved_and_gone_on, tmp_path), gone_on(None, tmp_path / "two", tmp_path / "one")]:
        assert_same_state(*(one.pop("own") for one in found))  # what pads it, too
        for one in found:
            equal(one, wanted)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"ranks.json", "rank-0", "rank-1"}
    assert {path.name for path in (tmp_path / "two/rank-1").iterdir()} == {"snapshot.json", "penstock.snapshot"}
    assert (tmp_path / "two").stat().st_mode & 0o77 == 0


def with_all_of_it(mesh: DeviceMesh, folder: Path) -> list[dict[str, Any]]:
    """Saved, loaded again, and a snapshot with a part for each rank loaded: by ranks that each have all of the state;
    and what these ranks do with their parts of what was saved."""
    how = HOW | {"stage": 0}
    with wrap(CASE, budget(folder / "store"), mesh=mesh, **how, delay=0.5) as engine:
        run_steps(engine, own(mesh, 2))
        engine.save(folder / "whole")
    saved(mesh, folder / "parts")
    found = gone_on(mesh, folder / "whole")
    with wrap(CASE, budget(folder / "other"), mesh=mesh, **how) as engine:
        for path in (folder / "whole", folder / "parts"):
            engine.load(path)
            ran = run_steps(engine, own(mesh, 1, first=engine.step_count + 1))
            found.append(results(engine, ran) | {"own": {}})
    return found


def test_ranks_that_each_have_all_of_the_state_save_it_once(tmp_path: Path) -> None:
    """A snapshot is one of one process then, and whoever has parts or all of it goes on from either."""
    with wrap(CASE, budget(None), **HOW) as engine:
        run_steps(engine, own(None, 2))
        wanted = results(engine, run_steps(engine, own(None, 1, first=3)))
    for found in [*together(2, with_all_of_it, tmp_path), gone_on(None, tmp_path / "whole")]:
        for one in found:
            one.pop("own")
            equal(one, wanted)
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {"snapshot.json", "penstock.snapshot"}


COMPACT = HOW | {"optimizer": replace(ADAMW, moments="int8")}


def in_another_form(mesh: DeviceMesh | None, folder: Path) -> list[dict[str, Any]]:
    """A step from a snapshot whose moments are fp32, and from the stores of several ranks that have the same state."""
    found = []
    with wrap(CASE, budget(None), mesh=mesh, **COMPACT) as engine:
        engine.load(folder / "one")
        found.append(results(engine, run_steps(engine, own(mesh, 1, first=3))))
        engine.save(folder / ("alone" if mesh is None else "together"))
    if mesh is not None:
        with wrap(CASE, budget(folder / "store"), mesh=mesh, **HOW) as engine:
            engine.load(folder / "one")
        with wrap(CASE, budget(folder / "store"), mesh=mesh, **COMPACT) as engine:
            found.append(results(engine, run_steps(engine, own(mesh, 1, first=3))))
    return found


def test_moments_of_a_snapshot_and_of_stores_are_converted_for_any_number_of_ranks(tmp_path: Path) -> None:
    with wrap(CASE, budget(None), **HOW) as engine:
        run_steps(engine, own(None, 2))
        engine.save(tmp_path / "one")
    (wanted,) = in_another_form(None, tmp_path)
    for found in together(2, in_another_form, tmp_path):
        for one in found:
            equal(one, wanted)
    with wrap(CASE, budget(None), **HOW) as engine:
        engine.load(tmp_path / "alone")
        wanted = results(engine, run_steps(engine, []))
        engine.load(tmp_path / "together")
        equal(results(engine, run_steps(engine, [])), wanted)


def said_of(call: Callable[[], None]) -> str:
    with pytest.raises(StoreError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def of_part(call: Call) -> bool:
    return "/rank-1/" in call.path


FAULTS: dict[str, tuple[int, int, Callable[[Call], bool]]] = {
    "no space for a part": (1, errno.ENOSPC, lambda call: call.name == "posix_fallocate"),
    "a part cannot be written": (1, errno.EIO, lambda call: call.writes and of_part(call)),
    "a part cannot be flushed": (1, errno.EIO, lambda call: call.flushes and of_part(call)),
    "it cannot be put in its place": (0, errno.EIO, lambda call: call.name == "fsync" and call.path.endswith("/in")),
    "who has a part cannot be said": (0, errno.ENOSPC, lambda call: call.writes and "ranks.json" in call.path),
}


Said = tuple[dict[str, str], list[float]]


def not_saved(mesh: DeviceMesh, folder: Path) -> Said:
    """What each fault has said on this rank, and the losses of one step, taken before and after it is loaded anew."""
    rank, said, losses = mesh.get_rank(), dict[str, str](), list[float]()
    first, second = ([step] for step in own(mesh, 2))
    with wrap(CASE, budget(None), mesh=mesh) as engine:
        run_steps(engine, first)
        engine.save(folder / "s")
        losses += run_steps(engine, second).losses
        said["there"] = said_of(lambda: engine.save(folder / "s"))
        for name, (victim, code, which) in FAULTS.items():
            hook = Nth(0 if rank == victim else -1, error(code), which)
            with intercepted(folder, hook):
                said[name] = said_of(lambda: engine.save(folder / "s", overwrite=True))
            assert hook.struck == (rank == victim), name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed, "free_bytes", lambda path: 65536)
            said["room"] = said_of(lambda: engine.save(folder / "s", overwrite=True))
        engine.load(folder / "s")
        losses += run_steps(engine, second).losses
        return said, losses


def assert_not_saved(folder: Path, found: Said, other: Said) -> None:
    (first, (loss, again)), (second, losses) = found, other
    assert loss == again
    assert losses == [loss, again]
    for name, (victim, code, _) in FAULTS.items():
        mine, theirs = (first, second) if victim == 0 else (second, first)
        assert ("are needed for" if name == "no space for a part" else os.strerror(code)) in mine[name], name
        assert theirs[name] == f"rank {victim}: {mine[name]}"
    assert "exists: give another path" in first["there"]
    assert "64 KiB are free" in first["room"]
    assert [path.name for path in folder.iterdir()] == ["s"]


def flipped(snapshot: Path, name: str) -> None:
    data = bytearray((snapshot / name).read_bytes())
    data[len(data) // 2] ^= 1
    (snapshot / name).write_bytes(data)


def swapped(snapshot: Path) -> None:
    (snapshot / "rank-0").rename(snapshot / "aside")
    (snapshot / "rank-1").rename(snapshot / "rank-0")
    (snapshot / "aside").rename(snapshot / "rank-1")


def mixed(snapshot: Path) -> None:
    shutil.rmtree(snapshot / "rank-1")
    shutil.copytree(snapshot.parent / "other" / "rank-1", snapshot / "rank-1")


WRONGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda snapshot: shutil.rmtree(snapshot / "rank-1"), "lacks the part of rank 1 of 2"),
    "swapped": (swapped, "has the part of rank "),
    "mixed": (mixed, "rank-1 is not a part of the snapshot that it lies in"),
    "a bit": (lambda snapshot: flipped(snapshot, "rank-1/penstock.snapshot"), "is damaged"),
    "who has it": (lambda snapshot: flipped(snapshot, "ranks.json"), "ranks.json is damaged"),
    "nobody": (lambda snapshot: (snapshot / "ranks.json").unlink(), "is not a snapshot"),
}


def not_loaded(mesh: DeviceMesh, folder: Path) -> Said:
    rank = mesh.get_rank()
    first, second = ([step] for step in own(mesh, 2))
    with wrap(CASE, budget(None), mesh=mesh) as engine:
        engine.save(folder / "other")
        run_steps(engine, first)
        engine.save(folder / "s")
        if rank == 0:
            for name, (spoil, _) in WRONGS.items():
                shutil.copytree(folder / "s", folder / name)
                spoil(folder / name)
        dist.barrier()
        said = {name: said_of(lambda name=name: engine.load(folder / name)) for name in WRONGS}  # type: ignore[misc]
        said["part"] = said_of(lambda: engine.load(folder / "s/rank-0"))
        said["one strand"] = said_of(lambda: engine.load(folder / "one"))
        losses = run_steps(engine, second).losses
        engine.load(folder / "s")
        losses += run_steps(engine, second).losses
        with pytest.raises(ConfigError) as caught:
            engine.save(folder / "late") if rank == 0 else engine.step(first[0])
        return said | {"alone": str(caught.value)}, losses


def assert_not_loaded(found: Said, other: Said) -> None:
    (first, losses), (second, _) = found, other
    for name, (_, words) in WRONGS.items():
        for rank, said in enumerate((first, second)):
            assert words in said[name], (name, rank)
    refused = "this engine's are in 2: 2 ranks cannot go on with the same numbers, 1 can (a pipeline counts as one)"
    assert first["one strand"].endswith(refused)
    assert second["one strand"].endswith(refused)
    assert losses[0] == losses[1]
    assert first["alone"] == second["alone"]
    assert "the same call, and theirs differ (rank 0: save; rank 1: step)" in first["alone"]


def left(mesh: DeviceMesh, folder: Path) -> int:
    """The step that is found after a snapshot failed on all and nobody minded."""
    rank, where = mesh.get_rank(), budget(folder / "store", weights="host", state="host")

    def leave() -> None:
        with wrap(CASE, where, mesh=mesh) as engine:
            run_steps(engine, own(mesh, 1))
            with intercepted(folder / "in", Nth(0 if rank else -1, error(errno.EIO))):
                engine.save(folder / "in" / "s")

    said_of(leave)
    with wrap(CASE, where, mesh=mesh) as engine:
        return engine.step_count


def not_restored(mesh: DeviceMesh, snapshot: Path) -> str:
    """What ends a rank where one cannot take over what all have found to be whole."""

    def fails(*_: Any) -> None:
        raise StoreError("the drive is gone")

    with pytest.MonkeyPatch.context() as patch, wrap(CASE, budget(None), mesh=mesh) as engine:
        if mesh.get_rank():
            patch.setattr(snapshots, "restore", fails)
        with pytest.raises((StoreError, RankError)) as caught:
            engine.load(snapshot)
        return f"{caught.type.__name__}: {caught.value}"


def all_of_it(mesh: DeviceMesh, places: list[Path]) -> tuple[Said, Said, int, str]:
    found = not_saved(mesh, places[0]), not_loaded(mesh, places[1]), left(mesh, places[2])
    return *found, not_restored(mesh, places[1] / "s")


def test_what_fails_on_one_rank_is_said_on_all_which_go_on_with_what_was_there_before(tmp_path: Path) -> None:
    """What cannot be saved, what cannot be loaded, and who ends for it."""
    places = [tmp_path / name for name in ("in", "from", "left")]
    for place in (*places, places[2] / "in"):
        place.mkdir()
    with wrap(CASE, budget(None)) as engine:
        engine.save(places[1] / "one")
    first, second = together(2, all_of_it, places)
    assert_not_saved(places[0], first[0], second[0])
    assert_not_loaded(first[1], second[1])
    assert (first[2], second[2]) == (1, 1), "closed as ever, where all ended together for a snapshot that failed"
    assert first[3] == "RankError: rank 1 has failed: StoreError: the drive is gone"
    assert second[3] == "StoreError: the drive is gone"
    with wrap(CASE, budget(None)) as engine, pytest.raises(StoreError, match=r"in 2 strands.*: give strands=2"):
        engine.load(places[1] / "s")

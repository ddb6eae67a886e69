"""Snapshots of a run: what of an engine they keep, and how it goes on from one."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engine.durability import Actions, Durability
from penstock.engine.fate import Action, Event
from penstock.engine.interrupt import holding
from penstock.engine.resources import EngineResources
from penstock.engine.runner import Runner
from penstock.state import snapshots
from penstock.state.record import check_param_groups


class Snapshots:
    """Saves and loads all that an engine trains, and its progress. Nothing may be pending then."""

    def __init__(self, resources: EngineResources, durability: Durability) -> None:
        self._resources = resources
        self._durability = durability
        self._ranks = resources.ranks
        self._apart = resources.settings.sync_buffers == "own"

    def agree(self, call: str, path: str | Path, **settings: Any) -> None:
        """All ranks make the same ``call`` after the same step."""
        if self._ranks.size > 1:
            step, place = self._resources.progress.step, str(Path(path).resolve())
            asked = {"call": call, "step": step, "path of the snapshot": place}
            self._ranks.agree_on_each(asked | settings)

    def save(self, path: Path, *, overwrite: bool) -> None:
        """Write a snapshot.

        Raises:
            StoreError: as of ``Engine.save``.
        """
        meta = {"model": self._resources.description, **self._resources.progress.record()}
        arrays, buffers = self._resources.arrays, self._resources.buffers
        share, apart = self._resources.share, self._apart
        with holding(False):
            snapshots.save(
                path, arrays, buffers, meta, overwrite=overwrite, ranks=self._ranks, share=share, apart=apart
            )

    def load(self, path: Path, runner: Runner | None) -> None:
        """Take over a snapshot, and commit it. ``runner``: that is there, if one is.

        Raises:
            StoreError, ConfigError: as of ``Engine.load``.
        """
        description, share = self._resources.description, self._resources.share
        opened = snapshots.opened(path, description, self._ranks, share, apart=self._apart)
        with holding(False), opened as snapshot:
            self._ranks.jointly("account of the snapshot", partial(self._check_account, snapshot.meta, str(path)))
            actions: Actions = {
                Action.MARK: partial(self._durability.mark, f"loading {path} did not begin"),
                Action.RESTORE: partial(self._restore, snapshot),
                Action.COMMIT: partial(self._durability.commit_loaded, runner, str(path)),
            }
            self._durability.follow(Event.LOAD, actions, f"loading {path}")

    def _check_account(self, meta: Mapping[str, Any], where: str) -> None:
        self._resources.progress.check(meta, where)
        check_param_groups(meta["param_groups"], self._resources.progress.record()["param_groups"], where)

    def _restore(self, snapshot: snapshots.Saved) -> Event:
        snapshots.restore(snapshot, self._resources.arrays, self._resources.buffers)
        self._ranks.gather_objects("restored state", None)  # which is that of one step once all have theirs
        self._resources.progress.adopt(snapshot.meta)
        for mine, saved in zip(self._resources.optimizer.param_groups, snapshot.meta["param_groups"], strict=True):
            mine.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        return Event.LOADED

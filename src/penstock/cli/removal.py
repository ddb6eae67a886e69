"""All that is ever removed of a run. Nothing else in ``penstock train`` removes anything that a run has left.

Two occasions: a run begins in the place of another one, or of its own beginning that came to nothing
(``remove_stores``, ``remove_files``); and a start fails before its first step is committed (``take_back``), so that the
next try finds the place free. The second is an error path: it removes what this start has made itself, and where a
store has a step it removes nothing.
"""

import errno
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace as with_changes
from pathlib import Path

from penstock import files
from penstock.cli.run_folder import ahead_folder, data_folder, has_steps, own_files, own_folders, settings_path
from penstock.cli.run_record import Replaced, RunRecord
from penstock.cli.run_snapshots import remove_abandoned_snapshots, snapshots_of
from penstock.config.budget import is_of_rank
from penstock.data.identity import IDENTITY
from penstock.errors import StoreError
from penstock.store.directory import LOCK, DirectoryLock, is_there, sync_directory
from penstock.store.facts import facts_of, facts_of_all
from penstock.store.owner import RUN_FILE, Owner
from penstock.store.removal import delete_part, delete_store

log = logging.getLogger("penstock")


def check_free(replaced: Sequence[Replaced]) -> None:
    """Raises StoreError: somebody is using the state that is to be removed."""
    for path in (Path(path) for one in replaced for path in one.disk):
        if is_there(path / LOCK):
            DirectoryLock(path).release()


def remove_stores(replaced: Sequence[Replaced]) -> None:
    """Remove stores that are to be replaced, with their owners' ids. Can be broken off anywhere and done again.

    Raises:
        StoreError: a store is in use, or cannot be read or removed.
    """
    for one in replaced:
        for path in reversed([Path(path) for path in one.disk]):  # the first has the commits: it is there to the last
            _remove_part(path, one.id)


def remove_files(folder: Path, *, ahead: bool) -> None:
    """Remove the own files of a run that is to be replaced, but for its settings, and put what has been made ``ahead``
    in their place, if that was. Can be done again.

    Raises:
        OSError: a file cannot be removed, or put in its place.
    """
    keep, made = settings_path(folder), ahead_folder(folder)
    folders = [path for path in own_folders(folder) if not (ahead and path == made)]
    _remove_files(folder, [path for path in own_files(folder) if path != keep], folders)
    if ahead:
        _put_in_place(made, folder)


def _put_in_place(made: Path, folder: Path) -> None:
    """Give a run's folder what has been made for it in another one, of which nothing stays."""
    data = data_folder(folder)
    for path in files.matching(data_folder(made), "*"):
        files.make_folder(data)
        path.rename(data / path.name)
    (made / IDENTITY).rename(folder / IDENTITY)
    files.remove(made)
    for place in filter(Path.is_dir, (data, folder)):
        sync_directory(place)


def remove_ahead(folder: Path) -> None:
    """Remove what was made for a run that has not begun in the place of the one in ``folder``, which stays.

    Raises:
        OSError: it cannot be removed.
    """
    files.remove(ahead_folder(folder))


@contextmanager
def _left_if_it_fails() -> Iterator[None]:
    """Leave what cannot be removed, and say so."""
    try:
        yield
    except OSError as error:
        log.warning("what this start has made cannot all be removed (%s): penstock train --resume clears it", error)


@_left_if_it_fails()
def take_back(folder: Path, record: RunRecord, stores: Sequence[Sequence[Path]]) -> None:
    """Remove what the start that wrote ``record`` has made, if no step is committed or written down. Raises nothing.

    ``stores``: the directories of each rank's store, of those on this host.
    """
    now = RunRecord.read(folder)
    if now is None or now.owner.id != record.owner.id or has_steps(folder) or snapshots_of(folder):
        return
    if now.pending is not None and now.pending.replaces:
        return  # it says what is still to be removed of the run before
    facts = facts_of_all(stores)
    if facts is not None and facts.owner == record.owner and not facts.untouched:
        return
    if now.has_state:
        with_changes(now, has_state=False).write(folder)  # from here on a store that is not found is not missed
    if not take_back_stores(stores, record.owner):
        return
    _remove_files(folder, own_files(folder), own_folders(folder))
    data = data_folder(folder)
    try:
        data.rmdir()
    except OSError:
        made = data.is_dir() and not data.is_symlink() and not data.is_mount()
        if made and not any(data.iterdir()):
            raise  # before the record is removed, without which nobody would know whose it is
    (folder / RUN_FILE).unlink(missing_ok=True)
    _remove_if_empty(folder)


@_left_if_it_fails()
def take_back_ahead(folder: Path) -> None:
    """As ``remove_ahead``. Raises nothing."""
    remove_ahead(folder)


@_left_if_it_fails()
def take_back_elsewhere(folder: Path, owner: Owner, stores: Sequence[Sequence[Path]]) -> None:
    """Remove the stores that a start has made on another host than the first, which has ``take_back`` do it. Raises
    nothing."""
    if not has_steps(folder) and not snapshots_of(folder):
        take_back_stores(stores, owner)


def take_back_stores(stores: Sequence[Sequence[Path]], owner: Owner) -> bool:
    """Remove stores that a start has made; False: somebody has begun to train one of them.

    Raises:
        OSError: one cannot be removed.
    """
    for paths in stores:
        if not _deleted(paths, owner):
            return False
        for path in paths:
            _remove_if_empty(path)
    return True


def _deleted(paths: Sequence[Path], owner: Owner) -> bool:
    """Remove a store, if it is that run's; False: somebody has begun to train it."""
    facts = facts_of(paths)
    if facts is None or facts.owner != owner:
        return True
    for _ in range(_TRIES):
        try:
            return delete_store(paths, only=lambda facts: facts.untouched and facts.owner == owner)
        except StoreError as error:
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                raise
            time.sleep(_APART)  # another rank is still about to end
    return delete_store(paths, only=lambda facts: facts.untouched and facts.owner == owner)


_TRIES, _APART = 20, 0.1
"""Number of looks at a store that is in use, and the seconds between two of them."""


def _remove_part(path: Path, owner: str) -> None:
    """Remove a directory's part of a store, if it is that run's, and what its steps have left beside it."""
    delete_part(path, only=lambda found: found.owner is not None and found.owner.id == owner)
    _remove_if_empty(path)


def _remove_files(folder: Path, own: Sequence[Path], folders: Sequence[Path]) -> None:
    for path in own:
        path.unlink(missing_ok=True)
    remove_abandoned_snapshots(folder)
    for path in (*folders, *snapshots_of(folder)):
        with suppress(FileNotFoundError):
            files.remove(path)
    sync_directory(folder)


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # something else is in it, or it is not there: not ours to remove
        path.rmdir()
        if is_of_rank(path):
            path.parent.rmdir()

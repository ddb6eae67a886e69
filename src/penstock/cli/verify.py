"""``penstock verify``: reads all that the last commit of a run names, and checks it."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.own_store import require_own_store
from penstock.cli.run_folder import settings_of
from penstock.cli.showing.display import fail
from penstock.cli.showing.progress import progress
from penstock.config import format_size
from penstock.errors import ConfigError
from penstock.run.slots import Slots, whole_commit
from penstock.store.directory import is_there
from penstock.store.manifest import DATA, MANIFEST
from penstock.store.store import Store

VERIFY_HELP = """\
penstock verify: reads all of the last commit of a run, and checks every checksum; changes nothing

  penstock verify RUN            RUN is the folder that penstock train wrote
  penstock verify DIR [DIR ...]  the directories of a store (budget.disk), in their order

Names every damage that it finds. Exit code 0: whole. 1: damaged, or in use by a run. 2: there is nothing to check.
"""


def parse_verify(words: Sequence[str]) -> tuple[Path, ...]:
    """The directories of the store that the words after ``penstock verify`` mean.

    Raises:
        ConfigError: no folder was given, one that is neither a run's nor a store's, or a run without a store.
    """
    for word in words:
        if word.startswith("--"):
            raise ConfigError(f"penstock verify has no {word}. {_HINT}")
    folders = tuple(Path(word) for word in words)
    if not folders:
        raise ConfigError(f"penstock verify takes a run's folder or the directories of a store. {_HINT}")
    if all(is_there(folder / DATA) or is_there(folder / MANIFEST) for folder in folders):
        return folders
    if len(folders) > 1:
        raise ConfigError(f"penstock verify takes one run's folder, and was given {' and '.join(words)}. {_HINT}")
    config = settings_of(folders[0])
    if not config.budget.disk_paths:
        raise ConfigError(f"{folders[0]} keeps no state on disk (budget.disk): there is nothing to verify")
    require_own_store(folders[0], config.budget.disk_paths)
    return config.budget.disk_paths


_HINT = "Try: penstock verify --help"


def verify(paths: Sequence[Path]) -> int:
    """Check a store and say what was found; returns the exit code.

    Raises:
        ConfigError: nothing has been committed yet.
        StoreError: the store is in use, cannot be opened, or was stopped within a step.
    """
    with Store.open(paths) as store:
        last, slots = whole_commit(store, paths[0]), Slots.of(store)
        current = {extent.name: slots.current(extent.name) for extent in store.layout.extents}
        began, damage, done = time.perf_counter(), list[str](), 0
        with progress("read") as bar:
            for part in store.verify(current):
                done = part.done
                damage += part.damage
                bar.show(part.done, part.total)
        seconds = time.perf_counter() - began
    print(
        f"{', '.join(map(str, paths))}: read {format_size(done)} in {len(current)} extents of step {last['step']}, the "
        f"last commit, in {seconds:.1f} s ({done / max(seconds, 1e-9) / 1e9:.2g} GB/s)"
    )
    if not damage:
        print("Every checksum is right.")
        return 0
    for found in damage:
        print(f"damaged: {found}")
    sys.stdout.flush()
    places = "1 place is" if len(damage) == 1 else f"{len(damage)} places are"
    fail(f"{places} damaged, and this state cannot be trained on: check the drive, and go on from a snapshot")
    return 1

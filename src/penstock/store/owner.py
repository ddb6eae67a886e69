"""The run that a store belongs to: the same id stands in the manifest of the store and in the folder of the run.

A store that ``penstock.wrap`` has made by itself belongs to no run: it goes on wherever a model fits it.
"""

import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.documents.text import MalformedError
from penstock.documents.typed import decode
from penstock.errors import StoreError
from penstock.store.directory import is_there
from penstock.store.records import read_document

RUN_FILE = "run.json"
RUN_KIND = "run"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A run. ``id``: made anew whenever a run begins. ``folder``: where its folder was then, for people."""

    id: str
    folder: str

    @staticmethod
    def new(folder: Path) -> "Owner":
        return Owner(id=uuid.uuid4().hex, folder=str(folder.resolve()))

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def owner_in(folder: Path) -> Owner | None:
    """The run whose folder this is; None if it is no run's.

    Raises:
        StoreError: the folder says which, and it cannot be read.
    """
    if not is_there(folder / RUN_FILE):
        return None
    body = read_document(folder / RUN_FILE, RUN_KIND)  # which says more than that: see ``cli.run_record``
    try:
        return decode(Owner, {key: body.get(key) for key in ("id", "folder")} if isinstance(body, dict) else body)
    except MalformedError as error:
        raise StoreError(f"{folder / RUN_FILE} is damaged: {error}") from error


def check_owner(found: Owner | None, wanted: Owner | None, where: str) -> None:
    """``found``: of the store in ``where``. ``wanted``: the run that is to go on there, None: no run.

    Raises:
        StoreError: the store belongs to another one; names it.
    """
    if found is None and wanted is not None:
        raise StoreError(
            f"{where} holds a store that belongs to no run, such as penstock.wrap makes: give the run another "
            "directory (budget.disk)"
        )
    if found is not None and (wanted is None or found.id != wanted.id):
        whose = f"{where} holds the state of another run, which began in {found.folder}"
        if wanted is None:
            raise StoreError(
                f"{whose}: go on with it there (penstock resume {found.folder}), say that it is meant "
                f"(wrap(run={found.folder!r})), or give another directory"
            )
        raise StoreError(f"{whose}, and not that of {wanted.folder}: give each run a directory of its own")

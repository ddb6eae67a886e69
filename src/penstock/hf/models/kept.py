"""A run's folder of its model: all that building and exporting it needs, but for the values in its store.

config.json             with the class and the dtype that an export has by default
generation_config.json  of models that generate
tokenizer.json ...      whatever the tokenizer is made of
*.py                    the model's own code, where that is trusted
penstock.json           the rules by which the files' names and layouts became the model's, and where these files were
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from penstock import files
from penstock.data.tokenizer import save
from penstock.errors import ConfigError
from penstock.hf.models import mapping, shell
from penstock.hf.models.folder import CONFIG, GENERATION, TOKENIZER_FILES, read_json

NOTES = "penstock.json"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A model as a run keeps it. ``rules``: None for a model that was made from a configuration. ``base``: the folder
    that its weights came from when the run began, if it was one of this machine's.
    """

    folder: Path
    config: Any
    model: Any
    rules: list[Any] | None
    base: str | None


def keep(
    folder: Path,
    model: Any,
    *,
    config: Any,
    dtype: torch.dtype,
    rules: Sequence[Any] | None,
    source: Path | None,
    tokenizer: Any = None,
    named: str | None = None,
) -> None:
    """Write ``folder``, whole or not at all.

    ``config``: as an export is to have it. ``source``: where the model's own files are. ``tokenizer``: of transformers,
    if it is another than the one in ``source``. ``named``: the model's folder, or its name on the hub, as it was given.

    Raises:
        ConfigError: it cannot be written.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        files.remove(partial)
        partial.mkdir()
        write_config(partial, config, type(model), dtype)
        _write_generation(partial, model, source)
        if tokenizer is not None:
            save(tokenizer, partial)
        elif source is not None:
            copy_tokenizer(source, partial)
        if source is not None and getattr(config, "auto_map", None):
            for path in files.matching(source, "*.py"):
                files.copy(path, partial / path.name)
        notes = {
            "rules": None if rules is None else mapping.rules_to_json(list(rules)),
            "code": _runs_code(model),
            "base": os.path.abspath(named) if named and Path(named).is_dir() else None,
        }
        files.replace(partial / NOTES, json.dumps(notes, indent=2) + "\n")
        files.sync_tree(partial)
        files.remove(folder)
        partial.rename(folder)
        files.sync_folder(folder.parent)
    except OSError as error:
        with suppress(OSError):
            files.remove(partial)
        raise ConfigError(f"{folder}: cannot keep the model's configuration there: {error}") from error


def _runs_code(model: Any) -> bool:
    """True if a model's class is from code that came with the model, which transformers loads as modules of its own."""
    return any(cls.__module__.startswith("transformers_modules") for cls in type(model).__mro__)


def write_config(folder: Path, config: Any, cls: Any, dtype: torch.dtype) -> None:
    """As ``save_pretrained`` of a model of a class, in ``dtype``, does."""
    own = deepcopy(config)
    own.dtype = shell.dtype_name(dtype)
    own.architectures = [cls.__name__]
    own.save_pretrained(folder)


def _write_generation(folder: Path, model: Any, source: Path | None) -> None:
    if not model.can_generate():
        return
    if source is not None and (source / GENERATION).is_file():
        # As it is: transformers refuses to write some that it reads, with settings that have no effect.
        files.copy(source / GENERATION, folder / GENERATION)
    else:
        model.generation_config.save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path, *, private: bool = True) -> None:
    """Copy from one folder of a model to another what prepares its inputs.

    Raises:
        OSError: it could not be read or written.
    """
    for place, pattern in (((source / name).parent, Path(name).name) for name in TOKENIZER_FILES):
        for file in files.matching(place, pattern):
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            files.copy(file, target, private=private)


def kept_model(folder: Path, *, trust_remote_code: bool = False, flag: str = "trust_remote_code=True") -> Kept:
    """The model that a folder keeps, without memory.

    ``trust_remote_code``: run the Python code that it is kept with. ``flag``: what says so to whoever is calling.

    Raises:
        ConfigError: it keeps none, or transformers cannot build it any more; it needs code, and is not trusted.
        ModelError: the installed transformers lacks a rule that it was loaded by.
    """
    if not (folder / CONFIG).is_file() or not (folder / NOTES).is_file():
        raise ConfigError(
            f"{folder} does not hold the configuration of the run's model, without which its store is no use"
        )
    notes = read_json(folder / NOTES)
    given = read_json(folder / CONFIG)
    needs = bool(notes.get("code") or (given.get("auto_map") and given.get("model_type") not in CONFIG_MAPPING))
    if needs and not trust_remote_code:
        raise ConfigError(
            f"{folder}: this model runs Python code of its own, and what a run's folder says is not enough to run it. "
            f"Read the code there, and if you trust it, say so with this command: {flag}"
        )
    config = shell.config_of(folder, trust_remote_code=needs)
    model = shell.build(config, shell.class_of(config, folder, trust_remote_code=needs))
    kept = notes["rules"]
    rules = None if kept is None else mapping.rules_of(model, kept)
    return Kept(folder=folder, config=config, model=model, rules=rules, base=notes.get("base"))

"""``export``: a trained model as a folder that any tool of Hugging Face loads, streamed out of the state as it lies.

The folder is what ``save_pretrained`` of the same model, in memory and in the same dtype, would write: names and
layouts by transformers' own rules, tied weights once, buffers too. It appears under its name whole or not at all.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from penstock import files
from penstock.compat.transformers import (
    custom_object_save,
    dtype_plan,
    left_out_of_files,
    remove_tied_weights_from_state_dict,
    rules_of,
)
from penstock.config import parse_size
from penstock.data.tokenizer import save
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, ModelError
from penstock.hf.models import mapping, shell
from penstock.hf.models.adapters import Merged, base_of, has_adapters, save_adapter
from penstock.hf.models.folder import CONFIG, GENERATION, INDEX
from penstock.hf.models.kept import NOTES, Kept, copy_tokenizer, write_config
from penstock.hf.models.mapping import Step
from penstock.hf.models.shard_files import ShardFiles, lay_out, writing
from penstock.state.values import Values
from penstock.store.directory import is_there
from penstock.store.snapshot_place import state_in
from penstock.store.whole import WholeFolder
from penstock.tape.kv_cache import as_given

Dtype = Literal["fp32", "bf16", "fp16"]
Progress = Callable[[int, int], None]
"""Called with the bytes written so far and with all that there are."""

SHARD_SIZE = "5GB"
"""Most bytes of a file where nobody says otherwise."""
_PIECE = 2 << 20  # elements of a parameter that are in memory at once


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model and its values. ``rules``: those that it was loaded by; None if it was not loaded."""

    cls: Any
    config: Any
    rules: list[Any] | None
    values: Values

    @staticmethod
    def of(kept: Kept, values: Values) -> "Source":
        """The model that a run keeps."""
        return Source(cls=type(kept.model), config=kept.config, rules=kept.rules, values=values)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The result of an export: its weights' dtype, and the number and size of their files."""

    dtype: torch.dtype
    files: int
    nbytes: int


def export(
    engine: Engine,
    out: str | Path,
    *,
    tokenizer: Any = None,
    dtype: Dtype | None = None,
    shard_size: str | int | float = SHARD_SIZE,
    overwrite: bool = False,
    merge: bool = False,
) -> None:
    """Write the model of an engine as a Hugging Face folder. Needs a few MB of memory, and of experts that are stored
    one by one, those of one block. Of several ranks all come here, and the first writes.

    Args:
        engine: of a model of transformers.
        out: the folder; its parent exists.
        tokenizer: to be saved beside the model.
        dtype: of its weights; None: the one that the model's configuration says, which is that of the folder it was
            loaded from.
        shard_size: most bytes of a file, but for one of a single larger tensor.
        overwrite: replace a model's folder that is there.
        merge: of a model with adapters (peft), write the whole model with these merged into its weights; if not, the
            adapter alone is written, in fp32 unless ``dtype`` says otherwise.

    Raises:
        ConfigError: the model is none of transformers, ``out`` exists, there is nothing to merge, or another argument
            has no effect or is none of those above.
        ModelError: a value is too large for ``dtype``, or an adapter is none that can be saved or merged.
        StoreError: the disk is full or fails.
    """
    model = _model_of(engine)
    if merge and not has_adapters(model):
        raise ConfigError("merge has no effect: this model has no adapters")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(f"tokenizer={tokenizer!r:.100}: must be a tokenizer of transformers, or None")
    if dtype is not None and dtype not in shell.FLOATS:
        raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(shell.FLOATS)}, or None")
    if not parse_size(shard_size):
        raise ConfigError(f"shard_size={shard_size!r}: must be more than 0")
    if has_adapters(model) and not merge and shard_size != SHARD_SIZE:
        raise ConfigError(f"shard_size={shard_size!r} has no effect: an adapter is one file. Leave it out")

    _export(engine, Path(out), tokenizer, merge=merge, dtype=dtype, shard_size=shard_size, overwrite=overwrite)


def export_as_given(engine: Engine, out: Path, *, tokenizer: Any, own: Mapping[str, torch.dtype]) -> None:
    """``export``, of which each parameter is written in a dtype of its ``own``; without any, as by default."""
    _export(engine, out, tokenizer, own=own)


def _export(
    engine: Engine,
    out: Path,
    tokenizer: Any,
    *,
    merge: bool = False,
    dtype: Dtype | None = None,
    own: Mapping[str, torch.dtype] | None = None,
    shard_size: str | int | float = SHARD_SIZE,
    overwrite: bool = False,
) -> None:
    model = _model_of(engine)
    more: dict[str, Any] = {"dtype": dtype, "own": own, "overwrite": overwrite}

    def write(values: Values) -> None:
        if has_adapters(model) and not merge:
            write_adapter(out, model, values, partial(_write_tokenizer, tokenizer), **more)
            return
        whole = model.get_base_model() if merge else model
        merged = Merged(values, model) if merge else values
        source = Source(cls=type(whole), config=as_given(whole.config), rules=rules_of(whole), values=merged)
        write_folder(out, source, partial(_write_companions, whole, tokenizer), shard_size=shard_size, **more)

    engine.on_first("export", write)


def _model_of(engine: Engine) -> Any:
    """Raises:
    ConfigError: the engine's model is none of transformers.
    """
    model: Any = engine.model
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise ConfigError(
            f"{type(model).__name__} is no model of transformers: save it with engine.master_parameters()"
        )
    return model


def _write_companions(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what goes beside a model's configuration and weights: generation settings, its own code, the tokenizer."""
    if model.can_generate():
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError as error:
            raise ConfigError(f"transformers does not write this generation_config: {shell.short(error)}") from error
    if model.is_remote_code():
        custom_object_save(model, folder)
    _write_tokenizer(tokenizer, folder)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    if tokenizer is not None:
        save(tokenizer, folder)


def write_adapter(
    out: Path,
    model: Any,
    values: Values,
    companions: Callable[[Path], None],
    *,
    dtype: Dtype | None = None,
    own: Mapping[str, torch.dtype] | None = None,
    overwrite: bool = False,
) -> Written:
    """An adapter's folder, whole or not at all. ``companions`` writes what goes beside it. ``own``: dtypes of
    parameters, by name, where not all have one ``dtype``.

    Raises: as ``export``.
    """
    dtypes = dict.fromkeys(values.parameters, shell.FLOATS[dtype]) if dtype else own or {}
    check = partial(_check_target, out, overwrite=overwrite, base=base_of(model))
    with WholeFolder(out, check=check) as folder, _finished(folder, out) as into:
        save_adapter(into, model, values, dtypes)
        companions(into)
    nbytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return Written(dtype=shell.FLOATS[dtype or "fp32"], files=1, nbytes=nbytes)


def copy_companions(kept: Path, folder: Path, *, adapter: bool = False) -> None:
    """Copy what a run keeps of its model beside the configuration: generation settings, code, and (of an ``adapter``
    that alone) the tokenizer.
    """
    copy_tokenizer(kept, folder, private=False)
    for file in sorted(kept.iterdir()):
        if not adapter and (file.name == GENERATION or file.suffix == ".py"):
            files.copy(file, folder / file.name, private=False)


def write_folder(
    out: Path,
    source: Source,
    companions: Callable[[Path], None],
    *,
    dtype: Dtype | None = None,
    own: Mapping[str, torch.dtype] | None = None,
    shard_size: str | int | float = SHARD_SIZE,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Written:
    """The folder, whole or not at all. ``companions`` writes what goes beside configuration and weights. ``own``:
    dtypes of parameters, by name, where not all have one ``dtype``; the configuration has the first of them.

    Raises: as ``export``.
    """
    base = source.values.base if isinstance(source.values, Merged) else None
    check = partial(_check_target, out, overwrite=overwrite, base=base)
    check()  # before what takes its time
    own = own or {}
    kind = shell.FLOATS[dtype] if dtype else next(iter(own.values()), shell.dtype_of(source.config)) or torch.float32
    twin, steps = _steps(source, kind, own)
    tensors = {name: tensor for step in steps for name, tensor in step.targets.items()}
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.numel() * tensor.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=parse_size(shard_size),
    )
    of_files = split.filename_to_tensors
    layouts = {file: lay_out({name: tensors[name] for name in names}) for file, names in of_files.items()}
    with WholeFolder(out, check=check) as folder:
        with closing(ShardFiles(folder.partial, layouts)) as shards:
            _fill(shards, twin, steps, source.values, progress)
            shards.finish()
        with _finished(folder, out) as into:
            write_config(into, source.config, source.cls, kind)
            if split.is_sharded:
                total = sum(place.shape.numel() for place in source.values.parameters.values())
                metadata = {"total_parameters": total, **split.metadata}
                body = {"metadata": metadata, "weight_map": split.tensor_to_filename}
                files.replace(into / INDEX, json.dumps(body, indent=2, sort_keys=True) + "\n", private=False)
            companions(into)
    return Written(dtype=kind, files=len(layouts), nbytes=sum(layout.nbytes for layout in layouts.values()))


@contextmanager
def _finished(folder: WholeFolder, out: Path) -> Iterator[Path]:
    """Inside, files are written into a folder under way to ``out``; then it takes its place, on the drive."""
    with writing(out):
        yield folder.partial
        files.sync_tree(folder.partial, private=False)
    folder.finish()


def _check_target(out: Path, *, overwrite: bool, base: Path | None) -> None:
    """``base``: the folder of the weights that adapters are for."""
    _check_not_kept(out)
    if not is_there(out):
        return
    if not overwrite:
        raise ConfigError(f"{out} exists: give another folder, or replace it (--overwrite, overwrite=True)")
    if not out.is_dir() or (
        any(out.iterdir()) and not any((out / name).is_file() for name in (CONFIG, "adapter_config.json"))
    ):
        raise ConfigError(f"{out} is no model's folder (it has no {CONFIG}), so it is not replaced: give another one")
    if base is not None and is_there(base) and base.resolve().is_relative_to(out.resolve()):
        raise ConfigError(
            f"{out} has the weights that the adapters are for, so it is not replaced: give another folder"
        )
    if (state := state_in(out, snapshots=True)) is not None:
        raise ConfigError(f"{out} is not replaced, as {state} would go with it: give another folder")


def _check_not_kept(out: Path) -> None:
    """Raises:
    ConfigError: ``out`` is, or is in, what a run keeps of its model, which it cannot do without and removes itself.
    """
    own = out.resolve()
    # A checkpoint of the Trainer has notes of that name as well, and is exported into.
    folders = (folder for folder in (own, *own.parents) if folder.name == "model")
    kept = next((folder for folder in folders if (folder / NOTES).is_file()), None)
    if kept is not None:
        raise ConfigError(f"{out}: a run keeps its model's configuration in {kept}: give a folder that is no run's own")


def _steps(source: Source, dtype: torch.dtype, own: Mapping[str, torch.dtype]) -> tuple[Any, tuple[Step, ...]]:
    """A twin of the model on the meta device, in the dtype that is written, and what becomes of the model's values.
    ``own``: dtypes of parameters that have another one.

    Raises:
        ModelError: the values are those of another model than its configuration describes.
    """
    twin = shell.build(source.config, source.cls, dtype=dtype)
    special, value_of = dtype_plan(twin, dtype), _names_of_values(twin, source.values)
    state = {}
    for name, like in twin.state_dict().items():
        kept = next((kind for pattern, kind in special.items() if re.search(pattern.replace("*", ".*"), name)), None)
        as_saved = (own.get(value_of[name]) or kept or like.dtype) if like.is_floating_point() else like.dtype
        state[name] = torch.empty(like.shape, dtype=as_saved, device="meta")
    for name in left_out_of_files(twin):
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, twin)
    _check_same(state, source.values, value_of)
    return twin, mapping.outwards(twin, state, source.rules)


def _names_of_values(twin: Any, values: Values) -> dict[str, str]:
    """The names in a model's ``state_dict``, with the one that each value has: a tied one has its first of several, and
    transformers may save it under another."""
    first, known = shell.first_names(twin), {*values.parameters, *values.buffers}
    return {name: name if name in known else first.get(name, name) for name in twin.state_dict()}


def _check_same(state: Mapping[str, torch.Tensor], values: Values, value_of: Mapping[str, str]) -> None:
    known = {name: place.shape for name, place in values.parameters.items()}
    known |= {name: buffer.shape for name, buffer in values.buffers.items()}
    for name, tensor in state.items():
        shape = known.get(value_of[name])
        if tensor.numel() == 0 and shape is None:
            continue  # a buffer without elements, which is no part of the state
        if shape != tensor.shape:
            raise ModelError(
                f"the model's configuration tells of {name} with shape {list(tensor.shape)}, and the state has "
                f"{'no such thing' if shape is None else list(shape)}: the model was changed after it was built, "
                "and its configuration was not"
            )


def _fill(shards: ShardFiles, twin: Any, steps: tuple[Step, ...], values: Values, progress: Progress) -> None:
    sizes = [sum(target.numel() * target.itemsize for target in step.targets.values()) for step in steps]
    done, value_of = 0, _names_of_values(twin, values)
    for step, nbytes in zip(steps, sizes, strict=True):
        if nbytes and step.copies:
            ((name, target),) = step.targets.items()
            _copy(shards, values, value_of[step.sources[0][0]], name, target.dtype)
        elif nbytes:
            _convert(shards, twin, step, values, value_of)
        done += nbytes
        progress(done, sum(sizes))


def _copy(shards: ShardFiles, values: Values, name: str, as_name: str, dtype: torch.dtype) -> None:
    """Write a value as it is, piece by piece."""
    if name in values.buffers:
        shards.write(as_name, 0, shell.cast(values.buffers[name].cpu().reshape(-1), dtype, name))
        return
    numel = values.parameters[name].shape.numel()
    room = torch.empty(min(_PIECE, numel))
    for start in range(0, numel, _PIECE):
        piece = room[: min(_PIECE, numel - start)]
        values.read(name, start, piece)
        shards.write(as_name, start, shell.cast(piece, dtype, name))


def _convert(shards: ShardFiles, twin: Any, step: Step, values: Values, value_of: Mapping[str, str]) -> None:
    """Write what a step makes of its sources, which are in memory for as long as that takes."""
    dtype = next(iter(step.targets.values())).dtype

    def read(source: str) -> torch.Tensor:
        name = value_of[source]
        whole = values.buffers[name].cpu() if name in values.buffers else values.parameter(name)
        return shell.cast(whole, dtype, name)

    for name, tensor in step.convert(twin, read).items():
        shards.write(name, 0, tensor.reshape(-1))

"""The reference that TRL's losses of preferences compare a model with: what it says of the data, kept in a file.

The reference is the model as it is before its first step. The engine goes through the data with it once, and its log
probabilities, a number or two an example, are kept in the run's ``output_dir``: a run that goes on after a kill has no
model any more that could say them.

    reference-HASH.safetensors    a column of the data set each, fp32 of shape (examples,)

The hash is of all that the numbers depend on: the data, whatever chunks they lie in, the collator, and the model's
values, configuration and precision.
"""

import pickle
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from accelerate.utils import gather_object
from datasets.fingerprint import Hasher
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn
from torch.utils.data import DataLoader
from transformers.utils.logging import tqdm

from penstock import files
from penstock.compat.trl import ReferenceSteps, hashed_by
from penstock.errors import ConfigError, ModelError, StoreError
from penstock.hf.checkpoint import OtherRunError
from penstock.hf.trainer_optimizer import precision_of
from penstock.hf.trl_trainer import TRLMixin
from penstock.state.memory import numpy_bytes
from penstock.store.directory import check_directory

T = TypeVar("T")

_ROWS = 1000
"""examples that are hashed at a time"""
_NOT_OF_NUMBERS = ("_name_or_path", "transformers_version")
"""keys of a configuration that say where a model is from"""


class PreferenceMixin(ReferenceSteps, TRLMixin):
    """``TRLMixin`` for trainers whose loss has a reference."""

    reference_columns: ClassVar[tuple[str, ...]]
    """names of what ``compute_ref_log_probs`` returns, as the data collator reads them"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._unhashed: ConfigError | ModelError | StoreError | None = None
        with hashed_by(type(self), self._hash):
            super().__init__(*args, **kwargs)

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuse a reference that would be a second model in memory, or a second adapter."""
        super().check_given(given)
        if given.get("ref_model") is not None:
            raise ConfigError(
                "ref_model cannot be honoured: it would be whole in memory, beside the budget. Leave it out, and set "
                "precompute_ref_log_probs=True: the reference is the model as it is before its first step"
            )
        if hasattr(given.get("model"), "peft_config"):
            raise ConfigError(
                f"the model has adapters already, of which {type(self).__name__} would make a copy for its reference: "
                "give the model without them, and peft_config=..., whose reference is the model without adapters"
            )
        if given.get("peft_config") is None and not getattr(given.get("args"), "precompute_ref_log_probs", False):
            raise ConfigError(
                f"{type(self).__name__} compares the model with a reference, which would be a second model, whole in "
                "memory: set precompute_ref_log_probs=True, and the engine computes what the model says of the data "
                "before its first step; or train adapters (peft_config), whose reference is the model without them"
            )

    def with_reference(self, dataset: Any, model_hash: str, name: str, batch_size: int) -> Any:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"precompute_ref_log_probs=True keeps what the reference says of each example, and the {name} data are "
                f"iterated ({type(dataset).__name__}): give a datasets.Dataset"
            )
        if there := sorted({*dataset.column_names} & {*self.reference_columns}):
            raise ConfigError(
                f"the {name} data have {' and '.join(there)} already, which precompute_ref_log_probs=True computes: "
                "remove these columns"
            )
        path, is_kept = self._of_all(lambda: self._place(dataset, model_hash), by_first=True)
        if not is_kept:
            self._ask(path, dataset, name, batch_size)
        kept = self._of_all(lambda: _read(path, name))
        for column, values in kept.items():
            dataset = dataset.add_column(column, values.numpy())
        return dataset

    def _of_all(self, work: Callable[[], T], *, by_first: bool = False) -> T:
        """This process's result of ``work``; ``by_first``: that of the first one, which does it for all, and is small.
        Or the error of any of them, on all. There is no engine yet, and may be none, whose ranks could tell each other.
        """
        found: T | None = None
        failure: ConfigError | ModelError | None = None
        try:
            if not by_first or self.accelerator.is_main_process:
                found = work()
        except (ConfigError, ModelError) as error:
            failure = error
        except OSError as error:
            failure = ConfigError(str(error))
        said = gather_object([(found if by_first else None, failure)])
        if failures := [error for _, error in said if error is not None]:
            raise failure or failures[0]
        return cast(T, said[0][0] if by_first else found)

    def _place(self, dataset: Any, model_hash: str) -> tuple[Path, bool]:
        """The file for a data set, and if it is there. Its folder is made, and can be written to."""
        if self._unhashed is not None:
            raise self._unhashed
        folder = Path(str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        check_directory(folder)
        digest = xxhash.xxh3_128(f"{model_hash} {getattr(self.args, 'ld_alpha', None)}".encode())
        for table in dataset.with_format("arrow").iter(batch_size=_ROWS):
            for column in sorted(table.column_names):
                digest.update(column.encode())
                _update(digest, table[column].combine_chunks())
        path = folder / f"reference-{digest.hexdigest()}.safetensors"
        return path, path.exists()

    def _ask(self, path: Path, dataset: Any, name: str, batch_size: int) -> None:
        """Have the reference say it, and keep it.

        Raises:
            ConfigError: there is no reference any more, as the run's store has a later state.
            StoreError: it cannot be kept.
        """
        try:
            assert self.engine is not None  # whose ranks these are
        except OtherRunError as error:
            raise ConfigError(
                f"{path} is not there, with what the model says of the {name} data before its first step: data, "
                "collator, model or settings are not what they were, or it was removed. It cannot be asked any more: "
                f"{error}"
            ) from error
        columns = self._columns(dataset, name, batch_size)
        with self._ranks.together("what the reference says"):
            self._ranks.jointly("what the reference says", lambda: _keep(path, {} if self._ranks.rank else columns))

    def _columns(self, dataset: Any, name: str, batch_size: int) -> dict[str, torch.Tensor]:
        """The reference's log probabilities: columns of shape (examples,), fp32. Processes share the examples, and as
        many batches go through a block together as in a step."""
        args = self.args
        loader: Any = DataLoader(
            dataset,
            batch_size=batch_size,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )
        found: dict[str, list[torch.Tensor]] = {column: [] for column in self.reference_columns}
        batches = iter(
            tqdm(self.accelerator.prepare(loader), desc=f"Reference of the {name} data", disable=args.disable_tqdm)
        )
        while together := list(islice(batches, args.gradient_accumulation_steps)):
            for said in self.evaluated(together, self.compute_ref_log_probs, "reference"):
                for column, values in zip(found, said, strict=True):
                    if values is not None:
                        found[column].append(self.accelerator.gather(values).float().cpu())
        # Processes are dealt neighbouring batches in turns, and the last ones are filled from the beginning.
        return {column: torch.cat(values)[: len(dataset)] for column, values in found.items() if values}

    def _hash(self, model: nn.Module) -> str:
        """A hash of the reference. Reads all of its values, in the first process, which tells the others."""
        if not self.accelerator.is_main_process:
            return ""
        try:
            return self._hashed(model)
        except (ConfigError, ModelError, StoreError) as error:  # said once all processes listen
            self._unhashed = error
            return ""

    def _hashed(self, model: nn.Module) -> str:
        config: Any = model.config
        facts = {key: value for key, value in config.to_dict().items() if key not in _NOT_OF_NUMBERS}
        precision = precision_of(self.args, model)
        digest = xxhash.xxh3_128(repr((type(model).__qualname__, sorted(facts.items()), precision)).encode())
        try:
            digest.update(Hasher.hash(self.data_collator).encode())  # now: one that counts is another one later
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"data_collator: what the reference says depends on it, and this {type(self.data_collator).__name__} "
                f"cannot be told from another one ({error}): give one that pickles"
            ) from error
        weights = self._asked(model).weights
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
            if not tensor.is_meta:
                values = tensor.cpu()
            elif weights is not None and name in weights:
                values = torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
                weights.fill(name, values)
            else:  # the model's own initial values
                digest.update(str(self.args.seed).encode())
                continue
            content: Any = numpy_bytes(values.contiguous().reshape(-1))
            digest.update(content)
        return digest.hexdigest()


def _update(digest: Any, column: pa.Array) -> None:
    """Add what a column has to a hash, whatever widths of numbers and chunks it lies in."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        digest.update(pc.list_value_length(column).to_numpy(zero_copy_only=False).astype("int64").tobytes())
        _update(digest, pc.list_flatten(column))
    elif pa.types.is_integer(kind) and not column.null_count:
        digest.update(column.to_numpy(zero_copy_only=False).astype("int64").tobytes())
    else:
        digest.update(repr(column.to_pylist()).encode())


def _read(path: Path, name: str) -> dict[str, torch.Tensor]:
    try:
        return load(path.read_bytes())
    except SafetensorError as error:
        raise ConfigError(
            f"{path}: what the reference says of the {name} data was kept there, and is damaged ({error}). Remove it: "
            "it is computed anew"
        ) from error
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is not there: all hosts have to see one output_dir") from error
    except OSError as error:
        raise ConfigError(f"{path}: what the reference says cannot be read: {error.strerror}") from error


def _keep(path: Path, columns: Mapping[str, torch.Tensor]) -> None:
    """Write a reference's file, if there are columns for it."""
    if not columns:
        return
    try:
        files.replace(path, save(dict(columns)), private=False)
    except OSError as error:
        raise StoreError(f"{path}: what the reference says cannot be kept: {error.strerror}") from error

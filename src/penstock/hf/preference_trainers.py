"""TRL's trainers of preferences on the engine: ``DPOTrainer`` and ``KTOTrainer``.

Their loss compares the model with a reference: the model as it is before the first step. A second model, whole in
memory beside the engine, is what their users cannot have. So the engine computes what the reference says of the data
before the first step, block by block, and its log probabilities, a number or two an example, are kept in a file of
``output_dir``. Where adapters are trained, the reference is the model without them, in the same forward.

    reference-HASH.safetensors    a column of the data set each, fp32 of shape (examples,); the hash is of the data,
                                  of the reference's values, and of what its log probabilities depend on
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import torch
import xxhash
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn
from torch.utils.data import DataLoader
from transformers.utils.logging import tqdm

from penstock import files
from penstock.compat.trl import DPOTrainer as PlainDPOTrainer
from penstock.compat.trl import KTOTrainer as PlainKTOTrainer
from penstock.compat.trl import ReferenceSteps, hashed_by, of_dpo
from penstock.errors import ConfigError
from penstock.hf.trl_trainer import TRLMixin
from penstock.state.memory import numpy_bytes

_ROWS = 1000
"""examples that are hashed at a time"""
_DEPENDS_ON = ("max_length", "truncation_mode", "ld_alpha", "disable_dropout", "bf16", "fp16", "seed")
"""arguments that change what a reference says of the same data"""


class PreferenceMixin(ReferenceSteps, TRLMixin):
    """``TRLMixin`` for trainers whose loss has a reference."""

    reference_columns: ClassVar[tuple[str, ...]]
    """names of what ``compute_ref_log_probs`` returns, as the data collator reads them"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with hashed_by(type(self), self._hash):
            super().__init__(*args, **kwargs)

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuse a reference that would be a second model in memory."""
        super().check_given(given)
        if given.get("ref_model") is not None:
            raise ConfigError(
                "ref_model cannot be honoured: it would be whole in memory, beside the budget. Leave it out, and set "
                "precompute_ref_log_probs=True: the reference is the model as it is before its first step"
            )
        adapters = given.get("peft_config") is not None or hasattr(given.get("model"), "peft_config")
        if not adapters and not getattr(given.get("args"), "precompute_ref_log_probs", False):
            raise ConfigError(
                f"{type(self).__name__} compares the model with a reference, which would be a second model, whole in "
                "memory: set precompute_ref_log_probs=True, and the engine computes what the model says of the data "
                "before its first step; or train adapters (peft_config), whose reference is the model without them"
            )

    def _hash(self, model: nn.Module) -> str:
        """A hash of the reference's values, and of what else its log probabilities depend on."""
        digest = xxhash.xxh3_128(repr([getattr(self.args, name, None) for name in _DEPENDS_ON]).encode())
        weights = self._asked(model).weights
        for name, tensor in sorted(model.state_dict().items()):
            if not tensor.is_meta:
                values = tensor.cpu()
            elif weights is not None and name in weights:
                values = torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
                weights.fill(name, values)
            else:
                continue  # the model's own initial values, which are by the seed
            content: Any = numpy_bytes(values.contiguous().reshape(-1))
            digest.update(name.encode())
            digest.update(content)
        return digest.hexdigest()

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """TRL's own, by the engine."""
        return self.evaluated(inputs, super().compute_ref_log_probs, "reference")

    def with_reference(self, dataset: Any, model_hash: str, name: str, batch_size: int) -> Any:
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"precompute_ref_log_probs=True keeps what the reference says of each example, and the {name} data are "
                f"iterated ({type(dataset).__name__}): give a datasets.Dataset"
            )
        path = Path(str(self.args.output_dir)) / f"reference-{_hash_of_rows(dataset, model_hash)}.safetensors"
        there = [path.exists()]
        broadcast_object_list(there, from_process=0)
        if not there[0]:
            columns = self._ask_reference(dataset, name, batch_size)
            if self.accelerator.is_main_process:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.replace(path, save(columns), private=False)
            self.accelerator.wait_for_everyone()
        try:
            kept = load(path.read_bytes())
        except SafetensorError as error:
            raise ConfigError(
                f"{path}: what the reference says of the {name} data was kept there, and is damaged ({error}). Remove "
                "it: it is computed anew"
            ) from error
        for column, values in kept.items():
            dataset = dataset.add_column(column, values.numpy())
        return dataset

    def _ask_reference(self, dataset: Any, name: str, batch_size: int) -> dict[str, torch.Tensor]:
        """The reference's log probabilities: columns of shape (examples,), fp32. Processes share the examples."""
        args, model = self.args, self.model
        assert isinstance(model, nn.Module)
        loader: Any = DataLoader(
            dataset,
            batch_size=batch_size,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )
        found: dict[str, list[torch.Tensor]] = {column: [] for column in self.reference_columns}
        batches = tqdm(
            self.accelerator.prepare(loader), desc=f"What the reference says of {name} data", disable=args.disable_tqdm
        )
        for batch in batches:
            for column, values in zip(found, self.compute_ref_log_probs(model, batch), strict=True):
                if values is not None:
                    found[column].append(self.accelerator.gather_for_metrics(values).float().cpu())
        return {column: torch.cat(values) for column, values in found.items() if values}


def _hash_of_rows(dataset: Any, model: str) -> str:
    """A hash of a reference and of all that is in a data set, in its order."""
    digest = xxhash.xxh3_128(model.encode())
    for table in dataset.with_format("arrow").iter(batch_size=_ROWS):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        digest.update(sink.getvalue())
    return digest.hexdigest()


class DPOTrainer(PreferenceMixin, PlainDPOTrainer):
    """``trl.DPOTrainer`` on the engine; takes ``engine=EngineArguments(...)`` beside TRL's own arguments.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    figures_of = of_dpo
    reference_columns = ("ref_chosen_logps", "ref_rejected_logps")


class KTOTrainer(PreferenceMixin, PlainKTOTrainer):
    """``trl.KTOTrainer`` on the engine, in one process; takes ``engine=EngineArguments(...)`` beside TRL's arguments.

    Raises:
        ConfigError: an argument cannot be honoured; it is named, and what to do.
    """

    reference_columns = ("ref_logps", "ref_KL_logps")

"""What both sides of a benchmark train on: the same model classes, weights, tokens and settings.

Imported by our side and by the peer's side, which runs in a virtual environment of its own. So this file
needs torch, transformers and safetensors only, and never Penstock.
"""

import argparse
import json
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """One training job. ``steps`` counts the warm-up steps too.

    ``model`` is a key of :data:`MODELS`; ``scratch`` is a directory on the disk under test.
    """

    model: str
    micro_batches: int
    batch: int
    length: int
    steps: int
    threads: int
    scratch: str

    @property
    def initial_weights(self) -> Path:
        return Path(self.scratch) / f"{self.model}.safetensors"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Work":
        return Work(**json.loads(text))


def _gpt_168m() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=1024,
        n_layer=12,
        n_head=16,
        vocab_size=8192,
        n_positions=256,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _llama(hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt-168m": _gpt_168m,
    "llama-10m": lambda: _llama(384, 1024, 5, 6, 2048),
    "llama-29m": lambda: _llama(512, 1344, 8, 8, 4096),
    "llama-45m": lambda: _llama(512, 1344, 12, 8, 8192),
    "llama-1.3b": lambda: _llama(2048, 5504, 24, 16, 32000),
    "llama-3.4b": lambda: _llama(3072, 8192, 28, 24, 32000),
    "llama-tiny": lambda: _llama(64, 176, 4, 2, 256),
    "gpt-tiny": lambda: _llama(64, 176, 3, 2, 8192),
}


def build(model: str, seed: int = _SEED) -> nn.Module:
    """The model in fp32 training mode, on whatever device is torch's default device in this context."""
    torch.manual_seed(seed)
    return MODELS[model]().float().train()


def recompute_activations(model: nn.Module, *, reentrant: bool) -> None:
    """Have a Hugging Face model keep only its layers' inputs and run each layer again in the backward."""
    enable: Any = model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def write_initial_weights(work: Work) -> None:
    """Save one set of initial weights, so that both sides start from the same bits."""
    if work.initial_weights.exists():
        return
    partial = work.initial_weights.with_suffix(".partial")
    save_file({name: p.detach().contiguous() for name, p in build(work.model).named_parameters()}, partial)
    partial.rename(work.initial_weights)


def build_initial(work: Work) -> nn.Module:
    """The model with the weights of :func:`write_initial_weights`.

    Raises:
        RuntimeError: the file holds other parameters than the model has.
    """
    model = build(work.model)
    weights = load_file(work.initial_weights)
    parameters = dict(model.named_parameters())
    if weights.keys() != parameters.keys():
        raise RuntimeError(f"{work.initial_weights} was written for another model: delete it")
    for name, p in parameters.items():
        p.data.copy_(weights[name])
    return model


class Tokens:
    """Deterministic micro-batches: the bytes of the Python standard library's own sources, one byte a token."""

    def __init__(self, work: Work) -> None:
        self._work = work
        needed = work.steps * work.micro_batches * work.batch * work.length
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= needed:
                break
        else:
            text *= -(-needed // len(text))
        self._ids = torch.frombuffer(text, dtype=torch.uint8)[:needed].long()

    def step(self, step: int) -> list[dict[str, torch.Tensor]]:
        """The micro-batches of a step: int64 ``input_ids`` and ``labels`` of shape (batch, length)."""
        work = self._work
        shape = (work.steps, work.micro_batches, work.batch, work.length)
        return [{"input_ids": ids, "labels": ids} for ids in self._ids.view(shape)[step]]


def peak_rss() -> int:
    """The largest resident memory that this process has had so far, in bytes (``VmHWM``)."""
    return _proc_field(Path("/proc/self/status"), "VmHWM") * 1024


def resident() -> int:
    """This process's resident memory now, in bytes (``VmRSS``)."""
    return _proc_field(Path("/proc/self/status"), "VmRSS") * 1024


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has made the block layer read and write so far; page cache hits do not count."""
    io = Path("/proc/self/io")
    return _proc_field(io, "read_bytes"), _proc_field(io, "write_bytes")


def _proc_field(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{path} has no {field}: benchmarks need Linux")


class Report:
    """Lines of JSON, one a step, that a side leaves for the process that started it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.write_text("")
        self._disk = disk_bytes()

    def step(self, *, seconds: float, loss: float, compute: float | None = None) -> None:
        """Record a step: its wall time, its mean loss, and what ``/proc`` says of memory and disk traffic. ``compute``:
        seconds that its forwards and backwards take alone, at most; None: the side does not know."""
        before, self._disk = self._disk, disk_bytes()
        record = {
            "seconds": seconds,
            "loss": loss,
            "peak_rss": peak_rss(),
            "read": self._disk[0] - before[0],
            "written": self._disk[1] - before[1],
            "compute": compute,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)

    def start(self) -> None:
        """Call when setting up has ended, so that its disk traffic does not count as the first step's."""
        self._disk = disk_bytes()


def main_of_rank(description: str | None, train: Callable[[Work], Sequence[Mapping[str, float | None]]]) -> None:
    """The program of one rank of a peer, which ``torchrun`` starts: it trains, and leaves a line of JSON a step."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", required=True, help="the job, as JSON (bench.workload.Work)")
    parser.add_argument("--report", required=True, type=Path, help="folder for each rank's file")
    arguments = parser.parse_args()
    work = Work.from_json(arguments.work)
    torch.set_num_threads(work.threads)
    lines = [json.dumps(step) for step in train(work)]
    (arguments.report / f"{os.environ['RANK']}.jsonl").write_text("\n".join(lines) + "\n")

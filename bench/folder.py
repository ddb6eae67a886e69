"""Peak memory of a model's way in and out: a folder of shards, two steps, and a folder again.

    python -m bench.folder

A Llama of 1.3B parameters (24 layers of 2048, vocabulary 32,000) is written as shards in bf16. Then three processes,
each measured by the kernel (``VmHWM``): one streams the folder into a store, one takes two steps of 256 tokens, one
streams the store into a folder. Required of each: at most 2.5 GB. Names, shapes and dtypes of both are compared.

The processes run with ``MALLOC_MMAP_THRESHOLD_=1048576``, as those of ``bench.large``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import penstock
import penstock.hf
from bench.harness import ROOT, SCRATCH, BenchError, machine, results_file, write_section
from bench.workload import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, peak_rss
from penstock.hf.models.exporting import Source, write_folder
from penstock.hf.models.folder import INDEX, weight_files
from penstock.hf.models.shards import read_headers
from penstock.state.values import committed

REQUIRED = 2_500_000_000
TOKENS = 256
SHARD = 500_000_000
STAGES = ("in", "steps", "out")
_MARK = "bench.folder: "


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one process says of itself. Bytes and seconds."""

    peak_rss: int
    seconds: float
    losses: list[float]


def config_of(layers: int, hidden: int, vocabulary: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def make(folder: Path, config: Any, shard: int = SHARD) -> int:
    """Write a folder of random weights, a shard at a time; returns the number of parameters."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    shards: list[dict[str, torch.Size]] = [{}]
    room = shard
    for name, like in state.items():
        if shards[-1] and like.numel() * 2 > room:
            shards.append({})
            room = shard
        shards[-1][name] = like.shape
        room -= like.numel() * 2
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    where = {}
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        values = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        for name, tensor in values.items():
            tensor.fill_(1) if name.endswith("norm.weight") else tensor.normal_(0, 0.02, generator=generator)
        save_file(values, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(values, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(like.numel() for like in state.values())


def wrap(source: Path, store: Path, device: str, host: str) -> penstock.Engine:
    loaded = penstock.hf.load(source)
    return penstock.wrap(
        loaded.model,
        weights=loaded.weights,
        optimizer=penstock.AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        budget=penstock.Budget(device=device, host=host, disk=store, weights="disk", state="disk"),
        precision="fp32",
        clip_grad_norm=None,
        device="cpu",
        plan=None,
    )


def export(source: Path, store: Path, out: Path) -> None:
    loaded = penstock.hf.load(source)
    with committed([[store]]) as found:
        rules = list(loaded.rules)
        model = Source(cls=type(loaded.model), config=loaded.config, rules=rules, values=found.values)
        write_folder(out, model, lambda folder: None, shard_size=SHARD)


def run(stage: str, scratch: Path, device: str, host: str) -> Stage:
    """One stage, in this process."""
    source, store, out = scratch / "in", scratch / "store", scratch / "out"
    began, losses = time.perf_counter(), list[float]()
    if stage == "out":
        export(source, store, out)
    else:
        with wrap(source, store, device, host) as engine:
            tokens = torch.randint(0, engine.model.config.vocab_size, (1, TOKENS))
            for _ in range(2 if stage == "steps" else 0):
                losses.append(engine.step([{"input_ids": tokens, "labels": tokens}]).loss)
    return Stage(peak_rss=peak_rss(), seconds=time.perf_counter() - began, losses=losses)


def outline(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Name -> shape and dtype of every tensor of a folder."""
    return {name: (t.shape, t.dtype) for name, t in read_headers(weight_files(folder)[0]).items()}


def child(stage: str, arguments: argparse.Namespace) -> Stage:
    """Run a stage in a process of its own.

    Raises:
        BenchError: it failed.
    """
    flags = ["--scratch", str(arguments.scratch), "--device", arguments.device, "--host", arguments.host]
    threads = str(arguments.threads)
    done = subprocess.run(
        [sys.executable, "-m", "bench.folder", "--child", stage, "--threads", threads, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": threads, "MALLOC_MMAP_THRESHOLD_": "1048576"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    marked = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not marked:
        raise BenchError(f"{stage} ended with code {done.returncode}; see above")
    return Stage(**json.loads(marked[-1]))


def describe(stages: dict[str, Stage], parameters: int, size: int, arguments: argparse.Namespace) -> str:
    """The section of the results file."""
    words = {
        "in": "the folder into a store (fp32, AdamW)",
        "steps": f"two steps of {TOKENS} tokens",
        "out": "the store into a folder (bf16)",
    }
    what = (
        f"Llama classes, {parameters / 1e9:.2f}B parameters, a folder of {size / 1e9:.2f} GB in bf16, budget: device "
        f"{arguments.device} + host {arguments.host}, {arguments.threads} threads, {machine()}"
    )
    losses = ", ".join(f"{loss:.4f}" for loss in stages["steps"].losses)
    rows = [
        what,
        "",
        f"| a process each | peak resident memory (at most {REQUIRED / 1e9:.1f} GB) | seconds |",
        "|---|---|---|",
        *(f"| {words[name]} | **{s.peak_rss / 1e9:.3f} GB** | {s.seconds:.0f} |" for name, s in stages.items()),
        "",
        f"Losses: {losses}. Names, shapes and dtypes of both folders are equal.",
        "",
        "Command: `python -m bench.folder`",
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, default=SCRATCH / "folder", help="directory with 40 GB free")
    parser.add_argument("--device", default="1GiB", help="device budget")
    parser.add_argument("--host", default="512MiB", help="host budget")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-record", action="store_true", help="print, but leave the results file alone")
    parser.add_argument("--child", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.scratch = arguments.scratch.resolve()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        print(f"{_MARK}{json.dumps(asdict(run(arguments.child, arguments.scratch, arguments.device, arguments.host)))}")
        return 0
    scratch: Path = arguments.scratch
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        parameters = make(scratch / "in", config_of(layers=24, hidden=2048, vocabulary=32000))
        stages = {name: child(name, arguments) for name in STAGES}
        same = outline(scratch / "in") == outline(scratch / "out")
        size = sum(file.stat().st_size for file in (scratch / "in").iterdir())
    except BenchError as error:
        print(f"bench.folder: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not same:
        print("bench.folder: the folders differ in names, shapes or dtypes", file=sys.stderr)
        return 1
    body = describe(stages, parameters, size, arguments)
    print(body)
    if not arguments.no_record:
        print(f"recorded in {write_section('folder', body, results_file())}")
    return 0 if all(stage.peak_rss <= REQUIRED for stage in stages.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

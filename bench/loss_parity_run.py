"""The process of ``bench.loss_parity`` that trains one form from one seed; prints one line of JSON."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

import penstock
from bench.corpus import Corpus, library_texts, read
from bench.harness import ROOT, machine
from bench.loss_parity import FORMS, Run, Setting, Task
from bench.workload import build
from penstock.config import LrScheduleConfig
from penstock.config.optimizer import OptimizerSpec

_KEPT_EVERY = 10  # steps whose mean training loss is one number of a record
_AT_ONCE = 32  # held-out windows in a micro-batch: a quarter less time each than with a few
_WHOLE = "512MiB"  # holds all that any of these models has, twice


def order(windows: int, seed: int) -> torch.Tensor:
    """[windows] The order in which a seed's runs see the windows."""
    return torch.randperm(windows, generator=torch.Generator().manual_seed(seed))


def micro_batch(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """``ids``: [batch, length]"""
    return {"input_ids": ids, "labels": ids}


def train(
    optimizer: OptimizerSpec,
    setting: Setting,
    seed: int,
    corpus: Corpus,
    *,
    say: Callable[[str], None],
    look: Callable[[int, penstock.Engine], None] = lambda step, engine: None,
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Training losses, each a mean of a few steps, and held-out losses; both by the step that they are of.

    ``look`` is shown the engine after each evaluation.
    """
    if (needed := setting.steps * setting.batch) > len(corpus.train):
        raise ValueError(f"{needed} windows in all steps: there are {len(corpus.train)} to train on")
    batches = corpus.train[order(len(corpus.train), seed)][:needed].split(setting.batch)
    held_out = [micro_batch(ids) for ids in corpus.held_out.split(_AT_ONCE)]
    schedule = LrScheduleConfig(kind="cosine", warmup_steps=setting.warmup, final=setting.final)
    losses: list[tuple[int, float]] = []
    evaluated: list[tuple[int, float]] = []
    began = time.perf_counter()
    with penstock.wrap(
        build(setting.model, seed),
        optimizer=optimizer,
        budget=penstock.Budget(device=_WHOLE, host=_WHOLE, state="device", durability="none"),
        precision="fp32",
        device="cpu",
        plan=None,
        seed=seed,
        clip_grad_norm=1.0,
    ) as engine:
        rate: Any = LambdaLR(engine.optimizer, lambda index: schedule.factor(index, setting.steps))
        recent: list[float] = []
        for step, ids in enumerate(batches, 1):
            recent.append(engine.step([micro_batch(ids)]).loss)
            rate.step()
            if step % _KEPT_EVERY == 0:
                losses.append((step, sum(recent) / len(recent)))
                recent.clear()
            if step % setting.evaluate_every == 0 or step == setting.steps:
                evaluated.append((step, engine.evaluate(held_out)))
                say(f"step {step}: held-out loss {evaluated[-1][1]:.4f}, {time.perf_counter() - began:.0f} s")
                look(step, engine)
    return losses, evaluated


def _commit() -> str:
    """Which sources these are, or "unknown" outside of a checkout."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    changed = git("diff", "--quiet", "HEAD", "--", "src", "bench/*.py").returncode
    return (git("rev-parse", "--short=10", "HEAD").stdout.strip() or "unknown") + ("-dirty" if changed else "")


def run(task: Task) -> Run:
    """Train and measure one form from one seed."""
    setting, form = task.setting, FORMS[task.form]
    corpus = read(
        library_texts(), vocabulary=setting.vocabulary, length=setting.length, held_out=setting.held_out_windows
    )
    optimizer = form.optimizer()
    began, commit = time.perf_counter(), _commit()
    losses, held_out = train(
        optimizer,
        setting,
        task.seed,
        corpus,
        say=lambda text: print(f"  {task.form}, seed {task.seed}, {text}", file=sys.stderr, flush=True),
    )
    return Run(
        form=task.form,
        seed=task.seed,
        setting=asdict(setting),
        optimizer=repr(optimizer),
        data=corpus.digest,
        unigram=corpus.unigram,
        parameters=sum(p.numel() for p in build(setting.model, task.seed).parameters()),
        losses=losses,
        held_out=held_out,
        tokens=setting.tokens,
        seconds=time.perf_counter() - began,
        versions={"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        commit=commit,
        machine=machine(),
    )


def main() -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    print(run(Task.from_json(sys.argv[1])).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())

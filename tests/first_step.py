"""A step in a process from which others are forked: what torch, the libraries and the engine make of code and of ops
when they first see them, those others have from their beginning.
"""

import os
import threading

import torch

from penstock.config import Budget
from tests.accelerator import DEVICE
from tests.models import MODELS, PLAIN
from tests.training import steps_of, wrap


def take() -> None:
    """A step and an evaluation of a model of torch's and of one of transformers', in memory; random numbers go on as if
    there had been none. Not where there is a GPU: autograd has threads of its own then, which a fork would lose."""
    if DEVICE == "cuda":
        return
    budget = Budget(device="64MiB", host="64MiB", durability="none")
    with torch.random.fork_rng(devices=[]):
        for case in (PLAIN, MODELS["llama"]):
            with wrap(case, budget, plan=None) as engine:
                (step,) = steps_of(case, 1)
                engine.step(step)
                engine.evaluate(step)
    there = {thread.name for thread in threading.enumerate()} - {"penstock-dropped"}  # which a fork starts anew
    assert len(there) == len(os.listdir("/proc/self/task")) - 1 == 1

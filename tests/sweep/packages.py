"""Packages that some types of model need and nothing else here does: installed beside the environment, for the sweep.

``make sweep`` puts them into ``.venv/sweep``, which ``python -m tests.sweep`` alone has on its path: transformers does
other things where it finds torchvision.
"""

import importlib.util
import re
from pathlib import Path

import torch

NEED_THEM = frozenset(("timm_wrapper", "fast_vlm", "gemma3n", "inkling_mm_model", "perception_lm"))
"""Types of model."""

_names = torch.library.Library("torchvision", "FRAGMENT")


def name_operations() -> None:
    """Let torchvision be imported beside a torch that its operations were not compiled for.

    Then they are not there, and its rules for them on the meta device would be an error. No model calls them, so that
    their names are enough.
    """
    vision = importlib.util.find_spec("torchvision")
    if vision is None or vision.origin is None:
        return
    rules = Path(vision.origin).with_name("_meta_registrations.py").read_text()
    for name in sorted(set(re.findall(r"torchvision::(\w+)", rules))):
        _names.define(f"{name}(Tensor x) -> Tensor")

"""``environment.json`` in a run's folder: the machine and the versions that it was last started with."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock import files
from penstock.config import format_size
from penstock.documents.text import parse_json, read_bounded
from penstock.hardware import system
from penstock.hardware.machine import Machine

ENVIRONMENT = "environment.json"
_PACKAGES = ("penstock", "torch", "transformers", "numpy", "triton")


def write_environment(folder: Path, device: str, profile: Machine | None) -> None:
    """``device``: the name of what computes; ``profile``: of the machine that the run was planned for, if it was."""
    now = system.look()
    found = {
        "machine": platform.node(),
        "system": platform.platform(),
        "processor": f"{system.cpu_name()}, {now.cores} core{'s' * (now.cores != 1)}",
        "memory": format_size(now.memory),
        "device": device,
    }
    if profile is not None and profile.measured is not None:
        load = f"other programs kept {profile.measured.load:.1f} cores busy"
        found["profile"] = f"measured {profile.measured.at}, {load}"
    found["Python"] = platform.python_version()
    found |= {name: known for name in _PACKAGES if (known := _version(name)) is not None}
    files.replace(folder / ENVIRONMENT, json.dumps(found, indent=2) + "\n")


def read_environment(folder: Path) -> Mapping[str, str]:
    """Empty where the run has not noted it; nothing depends on it, so what is damaged counts as not there."""
    try:
        found = parse_json(read_bounded(folder / ENVIRONMENT))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(key): value for key, value in found.items() if isinstance(value, str)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""Muon, and moments in 8 bits, of several ranks in every layout: the bits of one rank. Updates of matrices are put
together from all ranks' parts, within hosts and between them, before they are made orthogonal.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

import penstock
from tests.ranks import test_beside, test_bits, test_copies, test_levels
from tests.ranks.test_bits import FP32, HORIZONTAL, Numbers, Run
from tests.ranks.worlds import together

pytestmark = pytest.mark.usefixtures("one_thread")

ADAMW = penstock.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, moments="int8")
MUON = penstock.Muon(lr=0.02, moments="int8", adamw=penstock.AdamW(lr=1e-3))
FULL = penstock.Muon(lr=0.02, adamw=penstock.AdamW(lr=1e-3))


def of(optimizer: penstock.AdamW | penstock.Muon, precision: str = "bf16") -> Numbers:
    return replace(FP32, precision=precision, optimizer=optimizer)


WAYS: dict[str, tuple[Any, int, Numbers, Run]] = {
    "hosts, muon": (test_levels.trained_on_hosts, 4, of(MUON), Run(disk=True, chunk=4096)),
    "hosts, muon in fp32, stage 2": (test_levels.trained_on_hosts, 4, of(FULL, "fp32"), Run(settings={"stage": 2})),
    "copies, muon": (test_copies.trained_in_copies, 4, of(MUON), Run(disk=True, settings={"delay": 0.5})),
    "copies, adamw": (test_copies.trained_in_copies, 4, of(ADAMW), Run(disk=True, settings={"speculate": True})),
    "two ranks, muon": (test_bits.trained, 2, of(MUON, "fp16"), Run(disk=True, settings=HORIZONTAL)),
    "two ranks, adamw": (test_bits.trained, 2, of(ADAMW, "fp32"), Run(disk=True, settings={"delay": 1.0})),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "two ranks, muon" else [pytest.mark.campaign]) for way in WAYS]
)
def test_ranks_have_the_bits_of_one(way: str, tmp_path: Path) -> None:
    """Each time ``test_accelerator`` runs copies, with AdamW in 8 bits."""
    train, ranks, numbers, run = WAYS[way]
    for found in together(ranks, train, numbers, run, tmp_path / "store"):
        test_bits.equal(found, test_bits.alone(numbers))


def in_two_pipelines(mesh: DeviceMesh, numbers: Numbers, run: Run, disk: Path | None) -> dict[str, Any]:
    return test_beside.in_pipelines(mesh, 2, numbers, run, disk)


@pytest.mark.campaign
@pytest.mark.parametrize("optimizer", [MUON, ADAMW], ids=["muon", "adamw"])
def test_pipelines_beside_each_other_have_the_bits_of_one_process(
    optimizer: penstock.AdamW | penstock.Muon, tmp_path: Path
) -> None:
    """With Muon ``test_accelerator`` runs them each time."""
    numbers = of(optimizer)
    for found in together(4, in_two_pipelines, numbers, Run(disk=True), tmp_path / "store"):
        test_bits.equal(found, test_beside.alone(numbers))

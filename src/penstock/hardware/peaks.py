"""The peaks that makers state for their GPUs: what model FLOPs utilisation is of.

TFLOP/s of dense products (not of 2:4 sparse ones) that are summed in fp32, of the card's highest power limit; fp32 is
without TF32. From NVIDIA's data sheets and architecture white papers, each named in docs/machines.md, by the names that
torch gives the cards. A GPU that is not here has no peak that is known, and no MFU: one may be added to its profile by
hand (``device.peak``).
"""

from collections.abc import Mapping

_TERA = 1e12

_SIXTEEN_AND_FP32: Mapping[str, tuple[float, float]] = {
    "NVIDIA A100-SXM4-40GB": (312, 19.5),
    "NVIDIA A100-SXM4-80GB": (312, 19.5),
    "NVIDIA A100-PCIE-40GB": (312, 19.5),
    "NVIDIA A100 80GB PCIe": (312, 19.5),
    "NVIDIA H100 80GB HBM3": (989, 67),
    "NVIDIA H100 PCIe": (756, 51),
    "NVIDIA H200": (989, 67),
    "NVIDIA GH200 480GB": (989, 67),
    "NVIDIA B200": (2250, 75),
    "NVIDIA L4": (121, 30.3),
    "NVIDIA L40S": (362, 91.6),
    "NVIDIA RTX A6000": (154.8, 38.7),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (503.8, 126),
    "NVIDIA GeForce RTX 3090": (71.2, 35.6),
    "NVIDIA GeForce RTX 4060 Ti": (44.1, 22.1),  # 16 bits: not stated, twice fp32 as on the larger cards
    "NVIDIA GeForce RTX 4080": (97.5, 48.7),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "NVIDIA GeForce RTX 5060 Ti": (47.4, 23.7),  # 16 bits: not stated, as above
    "NVIDIA GeForce RTX 5080": (112.6, 56.3),
    "NVIDIA GeForce RTX 5090": (209.5, 104.8),
}
"""bf16 and fp16, which are as fast as each other, and fp32"""


def maker_peak(name: str) -> dict[str, float]:
    """FLOP/s by dtype of the GPU that torch calls so; empty: not known."""
    if name not in _SIXTEEN_AND_FP32:
        return {}
    sixteen, fp32 = _SIXTEEN_AND_FP32[name]
    return {"bf16": sixteen * _TERA, "fp16": sixteen * _TERA, "fp32": fp32 * _TERA}

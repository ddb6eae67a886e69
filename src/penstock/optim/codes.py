"""Moments in 8 bits: groups of neighbours that share a scale. What the bits mean is in ``docs/numerics.md``.

What is here is plain data; ``kernels`` reads and writes it in a step, and converts it (``encode``, ``decode``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

GROUP = 32
"""Codes that share a scale."""
BELOW = (127 - 48) << 10
"""The upper 18 bits of a scale's value as a float, without the sign, less its code."""
NAN_SCALE = 0xFFFF
"""The scale of a group that has a NaN: all its numbers are."""
FIRST, SECOND = 127, 255
"""The largest codes of a first and of a second moment."""
STEP, ROOT_STEP = (float(np.float32(1) / np.float32(largest)) for largest in (FIRST, SECOND))
"""The inverses of the largest codes, in fp32."""


FORMS: Mapping[str, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}
"""Form of moments -> the dtypes of the numbers, or of the codes, of a first and of a second one."""


@dataclass(frozen=True, kw_only=True)
class Codes:
    """The n numbers of one moment, a multiple of ``GROUP``. All zeros: they are all 0.

    Attributes:
        codes: [n] int8 of a first moment (``exp_avg``, ``momentum_buffer``), uint8 of a second one (``exp_avg_sq``).
        scales: [n / GROUP] int16, the bits of the scale of each group.

    Raises:
        ValueError: a tensor has another shape, dtype, device or layout than this.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        codes, scales = self.codes, self.scales
        if codes.dtype not in (torch.int8, torch.uint8) or codes.ndim != 1 or not codes.is_contiguous():
            raise ValueError(f"codes are {list(codes.shape)} {codes.dtype}: must be [n] contiguous int8 or uint8")
        fits = scales.dtype == torch.int16 and scales.ndim == 1 and scales.is_contiguous()
        if not fits or scales.device != codes.device or scales.numel() * GROUP != codes.numel():
            raise ValueError(
                f"scales are {list(scales.shape)} {scales.dtype} on {scales.device} for {codes.numel()} codes on "
                f"{codes.device}: there must be one contiguous int16 for each {GROUP} codes, on their device"
            )

    def numel(self) -> int:
        return self.codes.numel()

    def __getitem__(self, part: slice) -> "Codes":
        """A view of some whole groups.

        Raises:
            ValueError: the part begins or ends within a group.
        """
        start, stop, stride = part.indices(self.numel())
        if stride != 1 or start % GROUP or stop % GROUP:
            raise ValueError(f"codes[{start}:{stop}:{stride}]: must be whole groups of {GROUP}")
        return Codes(codes=self.codes[start:stop], scales=self.scales[start // GROUP : stop // GROUP])


Moment = torch.Tensor | Codes
"""One moment of n elements: [n] fp32 or bf16, or codes."""


def as_moments(arrays: Sequence[torch.Tensor], numel: int) -> tuple[Moment, ...]:
    """The moments of ``numel`` elements that arrays have: the numbers of each, and behind them, of codes, the scales of
    each, which may be more."""
    numbers = [array for array in arrays if array.dtype != torch.int16]
    scales = [array[: numel // GROUP] for array in arrays if array.dtype == torch.int16]
    if not scales:
        return tuple(numbers)
    return tuple(Codes(codes=codes, scales=own) for codes, own in zip(numbers, scales, strict=True))


def zero_moment(dtype: torch.dtype, n: int, device: torch.device | str = "cpu") -> Moment:
    """A moment of n elements before its first step: fp32, bf16, or codes (int8 of a first one, uint8 of a second)."""
    values = torch.zeros(n, dtype=dtype, device=device)
    if dtype in (torch.float32, torch.bfloat16):
        return values
    return Codes(codes=values, scales=torch.zeros(n // GROUP, dtype=torch.int16, device=device))

"""State in less memory: split weights lose nothing, and moments in 8 bits are what ``docs/numerics.md`` says."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.optim import kernels, library
from penstock.optim.codes import GROUP, Codes, zero_moment
from penstock.optim.formula import Hyper
from tests.optim.state import BF16, EIGHT_BIT, FP32, INT16, MOMENT_DTYPES, SPLIT, State, assert_same_bits, values

CODES = (torch.int8, torch.uint8)
LEVELS = (*library.levels(), "torch")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test with every implementation for the processor."""
    if request.param == "torch":
        monkeypatch.setattr(library, "native", lambda: None)
        yield request.param
        return
    with library.use_level(request.param):
        yield request.param


# ---- split weights

UPPERS = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF)
"""zero, denormals, the smallest normal number, around 1, the largest finite, infinity and NaNs; of both signs below"""


def every_lower() -> torch.Tensor:
    """All 2^16 lower halves below each of some upper ones."""
    uppers = np.array([sign | upper for upper in UPPERS for sign in (0, 0x8000)], np.uint32)
    bits = (uppers[:, None] << 16) | np.arange(1 << 16, dtype=np.uint32)
    return torch.from_numpy(bits.ravel().view(np.float32))


def test_split_weights_lose_nothing_but_which_nan_it_was(level: str) -> None:
    master = every_lower()
    weights, rest, back = torch.empty(len(master), dtype=BF16), torch.empty(len(master), dtype=INT16), master.clone()
    kernels.split(weights, rest, master, threads=2)
    kernels.join(back.zero_(), weights, rest, threads=2)
    u, nan = master.numpy().view(np.uint32), master.isnan().numpy()
    upper, lower = weights.view(INT16).numpy().view(np.uint16), rest.numpy().view(np.uint16)
    assert np.array_equal(upper[~nan], ((u[~nan].astype(np.uint64) + 0x8000) >> 16).astype(np.uint16))
    assert np.array_equal(lower[~nan], (u[~nan] & 0xFFFF).astype(np.uint16))
    assert np.array_equal(back.numpy().view(np.uint32)[~nan], u[~nan])
    assert (upper[nan] == 0x7FC0).all()
    assert not lower[nan].any()
    assert back.isnan().numpy()[nan].all()


def test_split_weights_are_the_nearest_and_the_larger_of_two_that_are_as_near(level: str) -> None:
    master = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 2**-8 - 2**-23, 1 + 3 * 2**-8, 3.4028235e38, 2.0**-134])
    weights, rest = torch.empty(6, dtype=BF16), torch.empty(6, dtype=INT16)
    kernels.split(weights, rest, master)
    assert weights.tolist() == [1 + 2**-7, -1 - 2**-7, 1.0, 1 + 2**-6, float("inf"), 2.0**-133]


# ---- 8 bits: the definition once more, in numpy


def scales_of(largest: NDArray[np.float32]) -> NDArray[np.int64]:
    u = largest.view(np.uint32).astype(np.int64)
    r = (u + 0xFFF + ((u >> 13) & 1)) >> 13
    code = np.clip(r - ((127 - 48) << 10), 1, 65534)
    return np.where(largest == 0, 0, np.where(np.isnan(largest), 65535, code))


def value_of(scale: NDArray[np.int64]) -> NDArray[np.float32]:
    bits = ((scale + ((127 - 48) << 10)) << 13).astype(np.uint32)
    return np.where(scale == 0, np.float32(0), np.where(scale == 65535, np.float32(np.nan), bits.view(np.float32)))


@np.errstate(all="ignore")
def encoded(x: NDArray[np.float32], second: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    one, most = np.float32(1), np.float32(255 if second else 127)
    sizes = (np.sqrt(x) if second else np.abs(x)).reshape(-1, GROUP)
    scale = scales_of(np.abs(sizes).max(axis=1))
    inverse = np.where((scale == 0) | (scale == 65535), np.float32(0), one / value_of(scale))[:, None]
    part = sizes * inverse
    q = np.rint(most * (part if second else (part + part) / (one + part)))
    q = np.where(q < most, q, most)
    q = np.maximum(q, 1) if second else q
    q = q * ((scale != 0) & (scale != 65535))[:, None]
    return (q.ravel() if second else np.where(np.signbit(x), -q.ravel(), q.ravel())).astype(np.int64), scale


@np.errstate(all="ignore")
def decoded(codes: NDArray[np.int64], scale: NDArray[np.int64], second: bool) -> NDArray[np.float32]:
    one, s, q = np.float32(1), value_of(scale)[:, None], np.abs(codes).astype(np.float32).reshape(-1, GROUP)
    if second:
        root = q * (s * (one / np.float32(255)))
        return (root * root).ravel()
    y = q * (one / np.float32(127))
    x = (y / (np.float32(2) - y)) * s
    return np.where(codes < 0, -x.ravel(), x.ravel())


def wild(n: int = 40 * GROUP) -> torch.Tensor:
    """Groups of one magnitude and of many, of zeros, and with infinities, NaNs, denormals and what no scale reaches."""
    rng = np.random.default_rng(7)
    even = rng.standard_normal((n // GROUP, GROUP)) * 10.0 ** rng.uniform(-20, 6, (n // GROUP, 1))
    ties = [1 + 2**-11, 1 + 3 * 2**-11, (1 + 2**-11) ** 2, (1 + 3 * 2**-11) ** 2]  # of scales, and of roots' scales
    edges = np.repeat([0.0, 1e-45, 1e-40, 2.0**-48, 2.0**-49, 65500.0, 65536.0, 3e38, np.inf, np.nan, *ties], GROUP)
    edges[GROUP // 2 :: GROUP] = 1e-3
    return torch.cat([torch.from_numpy(np.concatenate([even.ravel(), edges]).astype(np.float32)), values(rng, n, True)])


@pytest.mark.parametrize("dtype", CODES)
def test_codes_are_as_defined(level: str, dtype: torch.dtype) -> None:
    x, second = wild(), dtype == torch.uint8
    x = x.abs() if second else x
    codes, back = zero_moment(dtype, len(x)), torch.empty(len(x))
    assert isinstance(codes, Codes)
    kernels.encode(codes, x, threads=2)
    expected, scale = encoded(x.numpy(), second)
    assert np.array_equal(codes.scales.numpy().view(np.uint16), scale)
    assert np.array_equal(codes.codes.numpy(), expected)
    kernels.decode(back, codes, threads=2)
    assert_same_bits([back], [torch.from_numpy(decoded(expected, scale, second))])


@pytest.mark.parametrize("dtype", CODES)
def test_every_code_under_every_kind_of_scale_comes_back(level: str, dtype: torch.dtype) -> None:
    """A moment that is decoded and encoded again does not drift."""
    most = 127 if dtype == torch.int8 else 255
    low = -most if dtype == torch.int8 else 0
    every = torch.arange(low, most + 1).to(dtype)
    every = every[every != 0] if dtype == torch.uint8 else every  # which has 0 in groups of zeros alone
    groups = torch.cat([every.new_full((-len(every) % (GROUP - 1),), most), every]).view(-1, GROUP - 1)
    one = torch.cat([groups, groups.new_full((len(groups), 1), most)], dim=1)  # the largest sets the scale
    scales = torch.tensor([1, 2, 1023, 1024, 48 << 10, (48 << 10) + 511, (60 << 10) + 1, 65534]).to(INT16)
    codes = Codes(codes=one.repeat(len(scales), 1).view(-1), scales=scales.repeat_interleave(len(one)))
    back, again = torch.empty(codes.numel()), zero_moment(dtype, codes.numel())
    kernels.decode(back, codes)
    kernels.encode(again, back)
    assert isinstance(again, Codes)
    assert torch.equal(again.codes, codes.codes)
    assert torch.equal(again.scales, codes.scales)


@pytest.mark.parametrize("dtype", CODES)
def test_what_is_lost_is_less_than_a_code_of_the_largest(dtype: torch.dtype) -> None:
    x = values(np.random.default_rng(1), 64 * GROUP, wild=False) * 1e-6
    x = x.abs() if dtype == torch.uint8 else x
    codes, back = zero_moment(dtype, len(x)), torch.empty(len(x))
    kernels.encode(codes, x)
    kernels.decode(back, codes)
    if dtype == torch.uint8:
        x, back = x.sqrt(), back.sqrt()
    largest = x.view(-1, GROUP).abs().amax(dim=1, keepdim=True)
    lost = (back - x).view(-1, GROUP).abs() / largest
    assert lost.max() < (1 / 127 if dtype == torch.int8 else 1 / 510) + 2**-10


def test_a_size_above_the_largest_scale_is_the_one_that_the_page_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    said = re.search(r"A size above the largest \*S\*, ([\d,]+), is that", page)
    assert said is not None
    x, back = torch.tensor([65473.0, torch.inf]).repeat_interleave(GROUP), torch.empty(2 * GROUP)
    codes = zero_moment(torch.int8, len(x))
    kernels.encode(codes, x)
    kernels.decode(back, codes)
    assert back.unique().tolist() == [float(said[1].replace(",", ""))]


@pytest.mark.parametrize("dtype", CODES)
def test_a_nan_is_one_afterwards_and_so_is_its_group_but_no_other(level: str, dtype: torch.dtype) -> None:
    x = torch.ones(4 * GROUP)
    x[GROUP + 3], x[3 * GROUP] = torch.nan, torch.inf
    codes, back = zero_moment(dtype, len(x)), torch.empty(len(x))
    kernels.encode(codes, x)
    kernels.decode(back, codes)
    assert back[GROUP : 2 * GROUP].isnan().all()
    assert back[:GROUP].isfinite().all()
    assert back[2 * GROUP :].isfinite().all()
    largest = 65536.0 if dtype == torch.int8 else 65536.0**2
    assert float(back[3 * GROUP]) == pytest.approx(largest, rel=2e-3), "what is larger than any scale is the largest"


# ---- what that means for a step


def steps_of(dtype: torch.dtype, grad: Callable[[int], torch.Tensor], count: int, beta2: float = 0.999) -> State:
    state = State.of(torch.zeros(4 * GROUP), (torch.zeros(4 * GROUP),) * 2, SPLIT, dtype)
    hyper = Hyper(kind="adamw", lr=1e-3, betas=(0.9, beta2), eps=1e-12)
    for t in range(1, count + 1):
        kernels.step(hyper, t, grad=grad(t), **state[:])
    return state


def wide(state: State) -> list[torch.Tensor]:
    """Master copy and moments in fp32."""
    found = [torch.empty(4 * GROUP) for _ in range(3)]
    assert state.rest is not None
    kernels.join(found[0], state.weights, state.rest)
    for into, moment in zip(found[1:], state.moments, strict=True):
        kernels.decode(into, moment)
    return found


@pytest.mark.parametrize(
    ("dtype", "beta2", "least", "most"),
    [(EIGHT_BIT, 0.99, 0.9, 1.1), (EIGHT_BIT, 0.999, 1.0, 2.0), (EIGHT_BIT, 0.9995, 0.0, 0.1), (BF16, 0.999, 0.0, 0.1)],
)
def test_how_fast_a_second_moment_without_gradients_shrinks(
    dtype: torch.dtype, beta2: float, least: float, most: float
) -> None:
    """This holds as long as its root shrinks by more than half a step of the scale, 2^-11; in bf16 of the moment,
    2^-9."""

    def once(t: int) -> torch.Tensor:
        return torch.full((4 * GROUP,), 1e-3 if t == 1 else 0.0)

    begun, ended = (wide(steps_of(dtype, once, count, beta2))[2] for count in (1, 151))
    rate = (begun / ended).log() / (-150 * np.log(beta2))
    assert least <= float(rate.min())
    assert float(rate.max()) <= most


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4])
def test_steps_with_moments_in_8_bits_go_where_those_in_fp32_go(size: float) -> None:
    def noisy(t: int) -> torch.Tensor:
        return size * (1 + values(np.random.default_rng(t), 4 * GROUP, wild=False))

    exact, compact = (wide(steps_of(dtype, noisy, 100))[0] for dtype in (FP32, EIGHT_BIT))
    assert (exact < -0.03).all()
    assert ((compact - exact).abs() / exact.abs()).mean() < 0.05


def test_a_small_second_moment_beside_a_large_one_is_not_lost() -> None:
    """It would be 0, and where the next gradient happens to be small, a step would have no bound."""
    sizes = torch.full((4 * GROUP,), 1e-3)
    sizes[::GROUP] = 1.0  # the others' roots are 1/1000 of it: less than half a code

    def noisy(t: int) -> torch.Tensor:
        rng = np.random.default_rng(t)
        return sizes * values(rng, 4 * GROUP, wild=False) * torch.from_numpy(rng.random(4 * GROUP) < 0.9)

    exact, compact = (wide(steps_of(dtype, noisy, 60)) for dtype in (FP32, EIGHT_BIT))
    assert (compact[2] > 0).all()
    assert compact[0].abs().max() < 2 * exact[0].abs().max()


# ---- plain data


def test_a_part_of_codes_is_of_whole_groups() -> None:
    codes = zero_moment(torch.int8, 4 * GROUP)
    part = codes[GROUP : 3 * GROUP]
    assert isinstance(part, Codes)
    assert (part.numel(), part.scales.numel()) == (2 * GROUP, 2)
    for start, stop in ((1, GROUP), (0, GROUP - 1)):
        with pytest.raises(ValueError, match="whole groups of 32"):
            codes[start:stop]


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.zeros(GROUP), torch.zeros(1, dtype=INT16)),
        (torch.zeros(2 * GROUP, dtype=torch.int8)[::2], torch.zeros(1, dtype=INT16)),
        (torch.zeros(GROUP, dtype=torch.int8), torch.zeros(1, dtype=BF16)),
        (torch.zeros(GROUP, dtype=torch.int8), torch.zeros(2, dtype=INT16)),
        (torch.zeros(GROUP + 1, dtype=torch.int8), torch.zeros(1, dtype=INT16)),
    ],
)
def test_codes_that_do_not_fit_their_scales_are_refused(codes: torch.Tensor, scales: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be"):
        Codes(codes=codes, scales=scales)


@pytest.mark.parametrize("first", MOMENT_DTYPES)
@pytest.mark.parametrize("second", MOMENT_DTYPES)
def test_each_moment_has_a_form_of_its_own(
    first: torch.dtype, second: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, n = np.random.default_rng(2), 20 * GROUP
    grad, master, *moments = (values(rng, n, wild=True) for _ in range(4))
    hyper, found = Hyper(kind="adam", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), []
    for native in (library.native, lambda: None):
        monkeypatch.setattr(library, "native", native)
        parts = [
            State.of(master, (m, m.abs())[: i + 1], SPLIT, dtype)
            for i, (m, dtype) in enumerate(zip(moments, (first, second), strict=True))
        ]
        state = replace(parts[0], moments=(parts[0].moments[0], parts[1].moments[1]))
        kernels.step(hyper, 3, grad=grad, **state[:])
        found.append(state.tensors())
    assert_same_bits(*found)

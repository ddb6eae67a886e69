"""The native kernels and the torch fallback give the same bits, for all values, sizes, threads and instruction sets."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.optim import fallback, kernels, library
from penstock.optim.codes import GROUP, zero_moment
from penstock.optim.formula import MOMENTS, Hyper, Kind, scalars
from penstock.optim.norm import BLOCK
from penstock.schedule.program import round_up
from tests.accelerator import DEVICE
from tests.optim.state import (
    BESIDE,
    BF16,
    EIGHT_BIT,
    FORMS,
    FP16,
    FP32,
    MOMENT_DTYPES,
    SPLIT,
    WHOLE,
    Form,
    State,
    assert_same_bits,
    form_for,
    values,
)
from tests.patience import PATIENCE


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one step, master copy and moments in fp32; ``run`` gives its outputs as a list of tensors."""

    hyper: Hyper
    count: int
    grad: torch.Tensor
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    form: Form
    moment_dtype: torch.dtype
    grad_scale: float

    def state(self) -> State:
        return State.of(self.master, self.moments, form_for(self.hyper.kind, self.form), self.moment_dtype)

    def run_native(self, threads: int, part: int | None = None) -> list[torch.Tensor]:
        """``part``: the step is done in chunks of so many elements."""
        state, n = self.state(), len(self.master)
        for at in range(0, n, part or n):
            chunk = slice(at, at + (part or n))
            kernels.step(
                self.hyper,
                self.count,
                grad=self.grad[chunk],
                **state[chunk],
                grad_scale=self.grad_scale,
                threads=threads,
            )
        return state.tensors()

    def run_fallback(self) -> list[torch.Tensor]:
        state = self.state()
        fallback.step(self.hyper.kind, scalars(self.hyper, self.count, self.grad_scale), grad=self.grad, **state[:])
        return state.tensors()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind: Kind = draw(st.sampled_from(get_args(Kind)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.one_of(st.integers(1, 100), st.integers(1, 3 * BLOCK), st.integers(16 * BLOCK, 20 * BLOCK)))
    moment_dtype = draw(st.sampled_from(MOMENT_DTYPES))
    n = round_up(n, GROUP) if moment_dtype == EIGHT_BIT else n
    wild = draw(st.booleans())
    unit = st.floats(0, 0.9999)
    moments = tuple(values(rng, n, wild) for _ in range(MOMENTS[kind]))
    return Case(
        hyper=Hyper(
            kind=kind,
            lr=draw(st.floats(0, 1)),
            betas=(draw(unit), draw(unit)),
            eps=draw(st.sampled_from((0.0, 1e-8, 1e-3))),
            weight_decay=draw(st.sampled_from((0.0, 0.1, 1.7))),
        ),
        count=draw(st.integers(1, 10_000)),
        grad=values(rng, n, wild).to(draw(st.sampled_from((FP32, BF16)))),
        master=values(rng, n, wild),
        moments=(*moments[:1], *(v.abs() for v in moments[1:])),
        form=draw(st.sampled_from(FORMS)),
        moment_dtype=moment_dtype,
        grad_scale=draw(st.sampled_from((1.0, 0.3, 2.0**-16))),
    )


def everyday_case(
    kind: Kind, n: int, grad: torch.dtype = BF16, form: Form = BESIDE, moment_dtype: torch.dtype = FP32
) -> Case:
    rng = np.random.default_rng(0)
    first, *second = (values(rng, n, wild=False) for _ in range(2))
    moments = (first, *(v.abs() for v in second))[: MOMENTS[kind]]
    hyper = Hyper(kind=kind, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    return Case(
        hyper=hyper,
        count=7,
        grad=values(rng, n, wild=False).to(grad),
        master=values(rng, n, wild=False),
        moments=moments,
        form=form,
        moment_dtype=moment_dtype,
        grad_scale=0.5,
    )


def test_the_native_library_is_what_the_suite_runs_on() -> None:
    assert kernels.backend() == "native"
    assert library.levels()[0] == "baseline"


@given(case=cases(), threads=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_native_equals_fallback(case: Case, threads: int) -> None:
    assert_same_bits(case.run_native(threads), case.run_fallback())


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_all_instruction_sets_give_the_same_bits(case: Case) -> None:
    expected = case.run_native(threads=1)
    for level in library.levels():
        with library.use_level(level):
            assert_same_bits(case.run_native(threads=2), expected)


@pytest.mark.parametrize("part", [BLOCK, 3 * BLOCK, 64 * BLOCK])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_chunks_do_not_change_the_result(kind: Kind, part: int) -> None:
    case = everyday_case(kind, 70 * BLOCK, form=SPLIT if part == BLOCK else BESIDE, moment_dtype=EIGHT_BIT)
    assert_same_bits(case.run_native(threads=2, part=part), case.run_native(threads=1))


def test_an_unaligned_copy_equals_an_aligned_one() -> None:
    """The aligned one is written around the caches, the other is not."""
    case = everyday_case("adamw", 2 * BLOCK)
    arguments = case.state()[:] | {"weights": torch.zeros(2 * BLOCK + 1, dtype=BF16)[1:]}
    kernels.step(case.hyper, case.count, grad=case.grad, grad_scale=0.5, **arguments)
    assert_same_bits([arguments["weights"]], case.run_native(threads=1)[:1])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("threads", [1, 3])
def test_add_equals_fallback(dtype: torch.dtype, threads: int) -> None:
    rng = np.random.default_rng(1)
    acc, x = values(rng, 50_001, wild=True), values(rng, 50_001, wild=True).to(dtype)
    native, plain = acc.clone(), acc.clone()
    kernels.add(native, x, threads)
    plain.add_(x.float())
    assert_same_bits([native], [plain])


@pytest.mark.parametrize("level", library.levels())
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_half_precision_number_casts_to_fp32_and_back(dtype: torch.dtype, level: str) -> None:
    src = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide, back = torch.empty(2**16), torch.empty(2**16, dtype=dtype)
    with library.use_level(level):
        kernels.cast(wide, src)
        kernels.cast(back, wide)
    assert_same_bits([wide], [src.float()])
    number = ~src.isnan()
    assert_same_bits([back[number]], [src[number]])
    assert (back[~number].view(torch.int16) == {BF16: 0x7FC0, FP16: 0x7E00}[dtype]).all()


@pytest.mark.parametrize("level", library.levels())
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rounding_is_to_nearest_even_as_in_torch(dtype: torch.dtype, level: str) -> None:
    """Around every representable number: exact ties and their neighbours, and a sweep over all bit patterns."""
    pattern = np.arange(0, 2**32, 9_973, dtype=np.uint64).astype(np.uint32)
    halves = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float().numpy().view(np.uint32)
    )
    shift = 15 if dtype == BF16 else 12
    near = np.concatenate([halves + np.uint32((1 << shift) + d) for d in (-1, 0, 1)])
    src = torch.from_numpy(np.concatenate([pattern, near]).view(np.float32))
    native, plain = torch.empty(len(src), dtype=dtype), torch.empty(len(src), dtype=dtype)
    with library.use_level(level):
        kernels.cast(native, src, threads=2)
    fallback.cast(plain, src)
    assert_same_bits([native], [plain])
    number = ~src.isnan()
    assert_same_bits([native[number]], [src[number].to(dtype)])


def test_the_fallbacks_root_is_correctly_rounded() -> None:
    """Every mantissa at both parities of the exponent: torch's own fp32 root on a CPU fails this in some builds."""
    one_to_four = torch.arange(0x3F800000, 0x40800000, 7, dtype=torch.int64).to(torch.int32).view(FP32)
    assert torch.equal(one_to_four.double().sqrt_().float(), torch.from_numpy(np.sqrt(one_to_four.numpy())))


def test_denormals_survive_a_thread_that_flushes_them() -> None:
    case = everyday_case("sgd", 5 * BLOCK, FP32)
    tiny = torch.full_like(case.master, 1e-41)
    kept = Case(**{**vars(case), "grad": tiny, "master": tiny, "hyper": Hyper(kind="sgd", lr=0.5), "form": WHOLE})
    expected = kept.run_native(threads=2)
    assert (expected[0] != 0).all()
    torch.set_flush_denormal(True)
    try:
        flushed = kept.run_native(threads=2)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(flushed, expected)


def test_a_forked_child_gets_threads_of_its_own() -> None:
    """The parent's pool threads do not exist in the child: waiting for them would hang."""
    case = everyday_case("adamw", 70 * BLOCK)
    expected = case.run_native(threads=2)[1].numpy().tobytes()
    context = multiprocessing.get_context("fork")
    state = case.state()
    arguments = state[:]
    queue: multiprocessing.Queue[bool] = context.Queue()

    def step_in_child() -> None:
        """A step without torch's own operators, whose threads do not survive a fork."""
        kernels.step(case.hyper, case.count, grad=case.grad, **arguments, grad_scale=0.5, threads=2)
        queue.put(arguments["rest"].numpy().tobytes() == expected)

    child = context.Process(target=step_in_child, daemon=True)
    child.start()
    try:
        assert queue.get(timeout=PATIENCE)
    finally:
        child.kill()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("grad", torch.zeros(BLOCK, dtype=FP16)),
        ("grad", torch.zeros(BLOCK - 1)),
        ("weights", torch.zeros(2 * BLOCK, dtype=BF16)[::2]),
        ("weights", torch.zeros(BLOCK)),
        ("weights", torch.zeros(BLOCK, dtype=torch.float64)),
        ("rest", torch.zeros(2 * BLOCK)[::2]),
        ("rest", torch.zeros(BLOCK - 1)),
        ("rest", torch.zeros(BLOCK, dtype=BF16)),
        ("rest", None),
        ("moments", (torch.zeros(BLOCK),)),
        ("moments", (torch.zeros(BLOCK), torch.zeros(BLOCK, dtype=FP16))),
        ("moments", (torch.zeros(BLOCK), zero_moment(torch.int8, BLOCK))),
        ("moments", (zero_moment(torch.uint8, BLOCK), torch.zeros(BLOCK))),
        ("moments", (zero_moment(torch.int8, BLOCK - GROUP), torch.zeros(BLOCK))),
        ("partials", np.zeros(2)),
        ("partials", np.zeros(1, np.float32)),
        ("squares", torch.zeros(1, dtype=torch.float64)),
    ],
)
def test_wrong_buffers_are_refused_before_native_code_sees_them(name: str, wrong: object) -> None:
    good: dict[str, object] = {
        "grad": torch.zeros(BLOCK),
        "weights": torch.zeros(BLOCK, dtype=BF16),
        "rest": torch.zeros(BLOCK),
        "moments": (torch.zeros(BLOCK), torch.zeros(BLOCK)),
        "partials": np.zeros(1),
    }
    kernels.step(everyday_case("adamw", BLOCK).hyper, 1, **good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be|moments"):
        kernels.step(everyday_case("adamw", BLOCK).hyper, 1, **(good | {name: wrong}))  # type: ignore[arg-type]


@pytest.fixture
def fresh_library() -> Iterator[None]:
    library.native.cache_clear()
    yield
    library.native.cache_clear()


@pytest.mark.usefixtures("fresh_library")
def test_a_missing_library_is_said_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    case = everyday_case("adamw", BLOCK)
    with pytest.warns(RuntimeWarning, match="several times slower.*not built.*pip install"):
        assert kernels.backend() == "torch"
    assert_same_bits(case.run_native(threads=1), case.run_fallback())
    assert library.levels() == ()


@pytest.mark.usefixtures("fresh_library")
def test_the_environment_chooses_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KERNELS", "fast")
    with pytest.raises(ConfigError, match="'native' or 'torch'"):
        kernels.backend()
    monkeypatch.setenv("PENSTOCK_KERNELS", "native")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(ConfigError, match="not built"):
        kernels.backend()


@pytest.mark.usefixtures("fresh_library")
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_asking_for_torch_gives_torch_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    assert kernels.backend() == "torch"


@pytest.mark.accelerator
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_a_gpu_gives_the_same_bits(case: Case) -> None:
    state = case.state().to(DEVICE)
    kernels.step(case.hyper, case.count, grad=case.grad.to(DEVICE), **state[:], grad_scale=case.grad_scale)
    assert_same_bits(state.tensors(), case.run_native(threads=1))

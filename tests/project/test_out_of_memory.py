"""Running out of memory is known as that, whoever says so, and wherever errors are taken for something else."""

import ast
import re
import sys
from collections.abc import Callable
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine import planning
from penstock.engine.runner import Runner
from penstock.errors import ModelError, is_out_of_memory
from penstock.hf import split_attention
from penstock.optim import library
from penstock.tape.ulysses import Ulysses
from tests import models
from tests.models import MODELS
from tests.other_plans import other_plans
from tests.project.sources import nodes
from tests.training import budget, steps_of, wrap

pytestmark = pytest.mark.usefixtures("one_thread")

CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
OTHER = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    "said",
    [
        CUBLAS,
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried 8 bytes",
    ],
)
def test_whoever_says_it_running_out_of_memory_is_known(said: str) -> None:
    assert is_out_of_memory(RuntimeError(said))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(), OSError(12, "")], ids=repr)
def test_an_error_of_memorys_own_needs_no_words(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(("free", "known"), [(10 << 20, True), (10 << 30, False), (None, False)])
def test_a_library_that_could_not_begin_had_no_memory_where_the_device_has_none(
    free: int | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says the same where the driver is not one that it knows."""

    def memory() -> tuple[int, int]:
        if free is None:
            raise RuntimeError(OTHER)
        return free, 80 << 30

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(mem_get_info=memory))
    said = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(said)) is known


@pytest.mark.parametrize("error", [RuntimeError(OTHER), ValueError(CUBLAS), OSError(5, "")], ids=repr)
def test_other_errors_are_none_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_nobody_looks_for_one_of_its_forms_alone() -> None:
    word = "OutOfMemoryError"
    found = {name for name, node in nodes(word) if isinstance(node, ast.Attribute) and node.attr == word}
    assert found == {"errors.py"}, "ask is_out_of_memory"


# ---- where errors are taken for something else


def _in_pieces(tokens: torch.Tensor) -> None:
    split_attention(models.llama(), 2)(input_ids=tokens)


def _in_spans(tokens: torch.Tensor) -> None:
    model = models.llama()
    with closing(Ulysses(model, 2)):
        model(input_ids=tokens, use_cache=False)


@pytest.mark.parametrize("run", [_in_pieces, _in_spans])
def test_heads_that_have_no_memory_are_not_refused(
    run: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are: what some heads alone fail with is taken for a model whose heads do not go alone."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward
    for said, kind in ((CUBLAS, RuntimeError), (OTHER, ModelError)):

        def fails(module: Any, query: torch.Tensor, *args: Any, said: str = said, **kwargs: Any) -> Any:
            if query.shape[1] < 4:
                raise RuntimeError(said)
            return own(module, query, *args, **kwargs)

        monkeypatch.setattr(modeling_llama, "eager_attention_forward", fails)
        with torch.no_grad(), pytest.raises(kind, match=re.escape(said)):
            run(torch.randint(2, 50, (1, 8)))


@pytest.mark.parametrize("said", [CUBLAS, OTHER])
def test_a_changed_plan_that_has_no_memory_is_left(
    said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another error of the device's ends the run."""
    case, left = MODELS["skips"], [RuntimeError(said)]

    def runner(*args: Any) -> Runner:
        if left:
            raise left.pop()
        return Runner(*args)

    first, second = steps_of(case, 2)
    where = budget(None, weights=None, state=None)
    with wrap(case, where) as engine:
        engine.step(first)
        before = engine.plan.settings
        plans = other_plans(engine.inside.planning.request, seed=5)
        engine.inside.planning.change(next(plan for plan in plans if plan.place != before.place))
        monkeypatch.setattr(planning, "Runner", runner)
        if said == OTHER:
            with pytest.raises(RuntimeError, match="illegal memory access"):
                engine.prepare(second)
            return
        engine.prepare(second)
        assert "the plan is not changed" in caplog.text
        assert "CUBLAS_STATUS_ALLOC_FAILED" in caplog.text
        assert engine.plan.settings == before
        engine.step(second)


def test_kernels_that_have_no_memory_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps would run in plain torch from then on, many times slower."""

    def full(*_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    found = ModuleType("penstock.optim.fused")
    vars(found)["fold_squares"] = full
    monkeypatch.setitem(sys.modules, "penstock.optim.fused", found)
    library.fused.cache_clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        library.fused(torch.device("cpu"))

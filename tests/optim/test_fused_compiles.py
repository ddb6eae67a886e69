"""The GPU's kernels compile for one, in every form of state: Triton's interpreter takes what its compiler refuses."""

from typing import Any

import pytest

from penstock.optim.formula import Scalars

triton = pytest.importorskip("triton", reason="needs triton")

STATE: dict[str, dict[str, str | None]] = {
    "whole": {"weights": "*fp32", "rest": None},
    "split": {"weights": "*i16", "rest": "*i16"},
    "beside": {"weights": "*i16", "rest": "*fp32"},
    "made": {"weights": "*i16", "rest": None},
}
MOMENTS: dict[str, dict[str, str | None]] = {
    "fp32": {"first": "*fp32", "first_scales": None, "second": "*fp32", "second_scales": None},
    "bf16": {"first": "*i16", "first_scales": None, "second": "*i16", "second_scales": None},
    "int8": {"first": "*i8", "first_scales": "*i16", "second": "*u8", "second_scales": "*i16"},
}


def assembly(kernel: Any, arguments: dict[str, Any]) -> str:
    """What a kernel is compiled to for an H100; an argument is a type's name (as ``*fp32``), or a constant."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: arguments[name] if is_type(arguments[name]) else "constexpr" for name in kernel.arg_names}
    constants = {(place,): arguments[name] for place, name in enumerate(kernel.arg_names) if types[name] == "constexpr"}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    found = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32), options=options)
    return str(found.asm["ptx"])


def is_type(argument: Any) -> bool:
    return isinstance(argument, str) and argument.lstrip("*")[0] in "iufb" and argument[-1].isdigit()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("state", "moments"), [("whole", "fp32"), ("beside", "bf16"), ("split", "int8"), ("split", "fp32")]
)
def test_a_step_compiles_and_contracts_nothing(state: str, moments: str) -> None:
    import triton.language as tl

    from penstock.optim import fused_device

    scalars = dict.fromkeys(Scalars.__dataclass_fields__, "fp32")
    like = None if state == "whole" else tl.bfloat16
    settings = {"kind": "adamw", "rounding": moments == "fp32", "split": state == "split", "like": like}
    pointers = {"grad": "*fp32", "n": "i32", "squares": None if state == "whole" else "*fp64"}
    text = assembly(fused_device.step, pointers | scalars | STATE[state] | MOMENTS[moments] | settings)
    assert "fma.rn" not in text
    assert "div.rn.f32" in text
    assert ("mul.rn.f64" in text) == (state != "whole")


@pytest.mark.parametrize(
    ("kind", "state", "moments"),
    [("nesterov-muon", "made", "int8"), ("muon", "made", "fp32"), ("orthogonal", "split", "")],
)
def test_both_halves_of_a_step_of_matrices_compile(kind: str, state: str, moments: str) -> None:
    import triton.language as tl

    from penstock.optim import fused_device

    scalars = dict.fromkeys(Scalars.__dataclass_fields__, "fp32")
    settings = {"kind": kind, "rounding": False, "split": state == "split", "like": tl.bfloat16}
    none = dict.fromkeys(("first", "first_scales", "second", "second_scales"))
    kept = none | ({key: MOMENTS[moments][key] for key in ("first", "first_scales")} if moments else {})
    pointers = {"grad": "*bf16" if kind == "orthogonal" else "*fp32", "n": "i32", "squares": None}
    assert "fma.rn" not in assembly(fused_device.step, pointers | scalars | STATE[state] | kept | settings)


@pytest.mark.parametrize("codes", ["*i8", "*u8"])
@pytest.mark.parametrize("name", ["encode", "decode"])
def test_conversions_of_codes_compile(name: str, codes: str) -> None:
    from penstock.optim import fused_device

    arguments = {"codes": codes, "scales": "*i16", "values": "*fp32", "n": "i32"}
    assert "fma.rn" not in assembly(getattr(fused_device, name), arguments)


@pytest.mark.parametrize(("grad", "rounding"), [("*fp32", False), ("*fp32", True), ("*bf16", False)])
def test_squares_compile_and_contract_nothing(grad: str, rounding: bool) -> None:
    """In double, too, where a square is exact, so that a contraction would change nothing."""
    from penstock.optim import fused_device

    text = assembly(fused_device.squares, {"grad": grad, "squares": "*fp64", "rounding": rounding})
    assert "fma.rn" not in text
    assert "mul.rn.f64" in text
    assert "add.rn.f64" in text


@pytest.mark.parametrize(("like", "src"), [("bfloat16", "*fp32"), ("float16", "*fp32"), ("float16", "*bf16")])
def test_casts_compile(like: str, src: str) -> None:
    import triton.language as tl

    from penstock.optim import fused_device

    arguments = {"dst": "*i16", "src": src, "n": "i32", "like": getattr(tl, like)}
    assert assembly(fused_device.cast, arguments)


@pytest.mark.parametrize("name", ["split", "join"])
def test_conversions_of_halves_compile(name: str) -> None:
    from penstock.optim import fused_device

    arguments = {"weights": "*i16", "rest": "*i16", "master": "*fp32", "n": "i32"}
    assert assembly(getattr(fused_device, name), arguments)

"""CUDA's own calls are in one file, and where only CUDA is: all else is the same on any accelerator."""

import ast

import pytest

from tests.project.sources import trees

OF_CUDA = {
    "accelerator.py": "the calls of each kind of accelerator",
    "optim/fused.py": "Triton launches on CUDA's current device",
}
"""File -> why it names ``torch.cuda``."""


def names_cuda(tree: ast.AST) -> bool:
    """True if a source names ``torch.cuda``, or something in it. ``torch.backends.cuda`` is another module: switches of
    the whole process, which are there without a GPU, too."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                return True
            case ast.Import(names=names) if any(_in_cuda(alias.name) for alias in names):
                return True
            case ast.ImportFrom(module=str(module), names=names):
                if any(_in_cuda(f"{module}.{alias.name}") for alias in names):
                    return True
    return False


def _in_cuda(module: str) -> bool:
    return f"{module}.".startswith("torch.cuda.")


def test_cuda_is_named_where_there_is_a_reason() -> None:
    found = {name for name, tree in trees("cuda") if names_cuda(tree)}
    assert found == set(OF_CUDA), "torch.accelerator has it, or penstock.accelerator is the place for it"


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "f = torch.cuda.Stream",
        "import torch.cuda",
        "import torch.cuda.amp as amp",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "def f():\n    from torch.cuda.graphs import graph",
    ],
)
def test_a_name_of_cuda_is_found(line: str) -> None:
    assert names_cuda(ast.parse(line))


@pytest.mark.parametrize("line", ["torch.backends.cuda.enable_flash_sdp(True)", "import torch", "x.cuda", "'cuda'"])
def test_others_are_not(line: str) -> None:
    assert not names_cuda(ast.parse(line))

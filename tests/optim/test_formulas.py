"""The optimizers are those of the literature: over several steps equal to ``torch.optim`` up to a rounding per step."""

from collections.abc import Callable

import pytest
import torch

from penstock.config.optimizer import SGD, Adam, AdamW, Lion, OptimizerSpec
from penstock.optim import kernels
from penstock.optim.facade import StreamedOptimizer
from penstock.optim.formula import Hyper, scalars

N, STEPS = 8192, 8
Reference = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class ReferenceLion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, in its own terms."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, betas: tuple[float, float], decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # no closure
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(b1 * m + (1 - b1) * p.grad) + group["decay"] * p
                self.state[p]["m"] = b2 * m + (1 - b2) * p.grad
                p -= lr * update


CASES: list[tuple[OptimizerSpec, Reference]] = [
    (AdamW(), lambda ps: torch.optim.AdamW(ps)),
    (
        AdamW(lr=3e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=3e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    (Adam(), lambda ps: torch.optim.Adam(ps)),
    (Adam(lr=2e-3, weight_decay=0.05), lambda ps: torch.optim.Adam(ps, lr=2e-3, weight_decay=0.05)),
    (SGD(), lambda ps: torch.optim.SGD(ps)),
    (SGD(lr=0.1, weight_decay=0.01), lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.01)),
    (
        SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    (SGD(lr=0.1, momentum=0.9, nesterov=True), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True)),
    (
        Lion(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
        lambda ps: ReferenceLion(ps, lr=1e-3, betas=(0.9, 0.99), decay=0.1),
    ),
]


@pytest.mark.parametrize(("spec", "reference"), CASES, ids=lambda case: "" if callable(case) else str(case)[:40])
def test_equal_to_the_reference_in_double_and_in_fp32(spec: OptimizerSpec, reference: Reference) -> None:
    """fp32 rounding: 2^-24 relative in the update and in the parameter per step; the reference in fp32 has its own."""
    torch.manual_seed(0)
    start = torch.randn(N)
    grads = [torch.randn(N) * 10 ** (-i / 2) for i in range(STEPS)]
    ours, moments = start.clone(), tuple(torch.zeros(N) for _ in range(spec.moment_count))
    (hyper,) = StreamedOptimizer(spec, [("w", torch.nn.Parameter(start))]).hypers()
    exact, single = (torch.nn.Parameter(start.clone().to(dtype)) for dtype in (torch.float64, torch.float32))
    optimizers = [reference([exact]), reference([single])]
    for count, grad in enumerate(grads, start=1):
        kernels.step(hyper, count, grad=grad, weights=ours, moments=moments)
        for p, optimizer in zip((exact, single), optimizers, strict=True):
            p.grad = grad.to(p.dtype)
            optimizer.step()
    moved = (exact.detach() - start.double()).abs()
    tolerance = STEPS * 2**-23 * (start.abs().double() + moved) + 1e-12
    assert ((ours.double() - exact.detach()).abs() <= tolerance).all()
    assert ((ours - single.detach()).abs() <= 2 * tolerance).all()


def test_bias_correction_is_that_of_the_first_step() -> None:
    """After one step of AdamW without decay and with eps 0, each parameter has moved by lr against its gradient."""
    grad = torch.tensor([3.0, -0.25, 1e-6, -70.0])
    master, moments = torch.zeros(4), (torch.zeros(4), torch.zeros(4))
    hyper = Hyper(kind="adamw", lr=1e-2, betas=(0.9, 0.999))
    kernels.step(hyper, 1, grad=grad, weights=master, moments=moments)
    torch.testing.assert_close(master, -1e-2 * grad.sign(), rtol=1e-6, atol=0)


def test_grad_scale_is_a_scaled_gradient() -> None:
    torch.manual_seed(1)
    grad, hyper = torch.randn(N), Hyper(kind="momentum", lr=0.1, betas=(0.9, 0.0))
    results = []
    for g, scale in ((grad, 0.37), (grad * 0.37, 1.0)):
        master, moment = torch.ones(N), torch.zeros(N)
        kernels.step(hyper, 1, grad=g, weights=master, moments=(moment,), grad_scale=scale)
        results.append(master)
    assert torch.equal(*results)


def test_steps_are_numbered_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        scalars(Hyper(kind="adamw", lr=1e-3), 0)

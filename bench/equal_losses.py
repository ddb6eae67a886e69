"""Losses of Penstock through disk beside those of plain PyTorch in memory: the same model, weights, text and steps.

    python -m bench.equal_losses

A small Llama learns the bytes of Python's standard library in fp32, without clipping, three times:

- by a plain loop: the model in memory, gradients accumulated over micro-batches, ``torch.optim.AdamW``;
- by the same loop with AdamW as docs/numerics.md writes it, one rounding for each operation, in ten lines of torch;
- by ``penstock.wrap``, with weights, optimizer state and saved activations on disk.

Required: the last two have every loss equal in all bits. How far torch's own AdamW, which rounds otherwise, takes the
first from them is measured and drawn. Writes docs/equal_losses.svg and a section of the results.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import penstock
from bench.corpus import library_texts
from bench.harness import ROOT, machine, write_section
from bench.moving_svg import STYLE
from bench.workload import BETAS, EPS, WEIGHT_DECAY, build

PICTURE = ROOT / "docs" / "equal_losses.svg"
MODEL, STEPS, MICRO_BATCHES, SEQUENCES, LENGTH, RATE = "llama-tiny", 300, 4, 4, 128, 2e-3
_WIDTH, _TOP, _HIGH, _GAP, _LOW, _LEFT = 860, 40, 190, 46, 92, 70

Update = Callable[[int], None]
"""Steps all parameters with the gradients that they have, as the step of this number."""


def batches(steps: int) -> Iterator[list[torch.Tensor]]:
    """The micro-batches of each step, [sequences, length] bytes; none comes twice."""
    text, size = _text(), SEQUENCES * LENGTH
    for first in range(0, steps * MICRO_BATCHES * size, MICRO_BATCHES * size):
        ids = torch.tensor(list(text[first : first + MICRO_BATCHES * size]))
        yield list(ids.view(MICRO_BATCHES, SEQUENCES, LENGTH))


@cache
def _text() -> bytes:
    return "\n".join(library_texts().values()).encode()


def plain(make: Callable[[nn.Module], Update], steps: int) -> list[float]:
    """Losses of a loop in memory. Micro-batches are equally long, so each counts the same."""
    model, losses = build(MODEL), []
    update = make(model)
    for step, micro_batches in enumerate(batches(steps), 1):
        terms = []
        for ids in micro_batches:
            loss = model(input_ids=ids, labels=ids).loss / MICRO_BATCHES
            loss.backward()
            terms.append(loss.item())
        losses.append(math.fsum(terms))
        update(step)
        model.zero_grad()
    return losses


def torchs(model: nn.Module) -> Update:
    """``torch.optim.AdamW``, as it comes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    return lambda step: optimizer.step() and None


def written_out(model: nn.Module) -> Update:
    """AdamW by the table of docs/numerics.md; a number is rounded to fp32 where it meets a tensor."""
    (beta1, beta2), parameters = BETAS, list(model.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def update(step: int) -> None:
        rate, root = RATE / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
        for p, (m, v) in zip(parameters, moments, strict=True):
            assert p.grad is not None
            g = p.grad
            p.mul_(1 - RATE * WEIGHT_DECAY)
            m.copy_(m + (g - m) * (1 - beta1))
            v.copy_(v * beta2 + (g * (1 - beta2)) * g)
            deviation = v.double().sqrt().float()  # torch's own root in fp32 is not rounded correctly on every CPU
            p.sub_((m * rate) / (deviation * root + EPS))

    return update


def streamed(steps: int, folder: Path) -> list[float]:
    """Losses of Penstock with everything on disk that can be there."""
    budget = penstock.Budget(
        device="32MiB", host="32MiB", disk=folder, weights="disk", state="disk", activations="disk"
    )
    optimizer = penstock.AdamW(lr=RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    with penstock.wrap(
        build(MODEL), optimizer=optimizer, budget=budget, precision="fp32", device="cpu", plan=None, clip_grad_norm=None
    ) as engine:
        found = batches(steps)
        return [engine.step([{"input_ids": ids, "labels": ids} for ids in step]).loss for step in found]


def distances(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


def describe(ours: Sequence[float], same: Sequence[float], torch_s: Sequence[float]) -> str:
    """The section of the results file."""
    away = distances(ours, torch_s)
    first = next((step for step, distance in enumerate(away, 1) if distance), None)
    largest = max(away)
    step = away.index(largest) + 1
    return (
        f"{MODEL}, {sum(p.numel() for p in build(MODEL).parameters()):,} parameters, fp32, no clipping; {STEPS} steps "
        f"of {MICRO_BATCHES} micro-batches of {SEQUENCES}x{LENGTH} bytes of Python's standard library, none twice; "
        f"weights, state and saved activations on disk; {machine()}\n\n"
        "| beside Penstock through disk | losses that differ | largest difference |\n|---|---|---|\n"
        f"| a plain loop in memory, AdamW written out | {_differing(ours, same)} of {STEPS} | "
        f"{max(distances(ours, same)):g} |\n"
        f"| a plain loop in memory, `torch.optim.AdamW` | {_differing(ours, torch_s)} of {STEPS}, from step {first} on "
        f"| {largest:.1e}, of {torch_s[step - 1]:.3f} at step {step} |\n\n"
        f"Losses go from {ours[0]:.3f} to {ours[-1]:.3f} nats a byte.\n\nCommand: `python -m bench.equal_losses`"
    )


def _differing(a: Sequence[float], b: Sequence[float]) -> int:
    return sum(x.hex() != y.hex() for x, y in zip(a, b, strict=True))


def draw(ours: Sequence[float], torch_s: Sequence[float]) -> str:
    """Both curves, and below them their distance, as the text of an SVG file."""
    high, low = max(*ours, *torch_s), min(*ours, *torch_s)
    base = _TOP + _HIGH
    floor = base + _GAP + _LOW

    def x(step: int) -> float:
        return _LEFT + (step - 1) * (_WIDTH - _LEFT - 20) / (len(ours) - 1)

    def line(losses: Sequence[float]) -> str:
        return " ".join(
            f"{x(i):.1f},{_TOP + (high - loss) * _HIGH / (high - low):.1f}" for i, loss in enumerate(losses, 1)
        )

    def y(distance: float) -> float:  # from 1e-8 at the floor to 1e-2
        return floor - min(max(math.log10(distance) + 8, 0), 6) * _LOW / 6

    dots = "".join(
        f'<circle cx="{x(i):.1f}" cy="{y(distance):.1f}" r="1.6"/>'
        for i, distance in enumerate(distances(ours, torch_s), 1)
        if distance
    )
    labels = [
        (_LEFT - 10, _TOP + 4, "end", f"{high:.2f}"),
        (_LEFT - 10, base + 4, "end", f"{low:.2f}"),
        *((_LEFT - 10, floor - n * _LOW / 3 + 4, "end", f"1e{-8 + 2 * n}") for n in range(4)),
        (_LEFT, floor + 22, "start", "step 1"),
        (_WIDTH - 20, floor + 22, "end", str(len(ours))),
        (_LEFT, base + 30, "start", "distance of the two losses, where there is any"),
        (112, 22, "start", "plain PyTorch, in memory"),
        (362, 22, "start", "Penstock, through disk"),
        (_LEFT - 10, 22, "end", "loss"),
    ]
    texts = (f'<text class="s" x="{a}" y="{b:.1f}" text-anchor="{end}">{text}</text>' for a, b, end, text in labels)
    height = floor + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">',
            "<title>Losses of plain PyTorch and of Penstock through disk, and their distance</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
            '<g fill="none" stroke-linejoin="round" stroke-linecap="round">',
            (
                f'<path d="M82 18h22" stroke="var(--whole)" stroke-width="7"/><polyline points="{line(torch_s)}" '
                'stroke="var(--whole)" stroke-width="7"/>'
            ),
            (
                f'<path d="M332 18h22" stroke="var(--first)" stroke-width="1.6"/><polyline points="{line(ours)}" '
                'stroke="var(--first)" stroke-width="1.6"/>'
            ),
            f'<path d="M{_LEFT} {floor}H{_WIDTH - 20}M{_LEFT} {base + 8}H{_WIDTH - 20}" stroke="var(--edge)"/></g>',
            f'<g class="k">{dots}</g>',
            *texts,
            "</svg>",
            "",
        ]
    )


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    torch_s, same = plain(torchs, STEPS), plain(written_out, STEPS)
    with TemporaryDirectory() as folder:
        ours = streamed(STEPS, Path(folder))
    body = describe(ours, same, torch_s)
    print(body)
    if _differing(ours, same):
        print("bench.equal_losses: Penstock's losses are not those of the loop with its formulas", file=sys.stderr)
        return 1
    PICTURE.write_text(draw(ours, torch_s))
    print(f"recorded in {write_section('equal_losses', body)} and {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

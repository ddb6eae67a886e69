"""The kinds of work that the engine's lanes do, as loads to be run over and over.

Pieces have the size of the engine's largest chunk, and walk through more memory than a cache holds, as a step does.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
import torch.nn.functional as F

from penstock import accelerator
from penstock.config.optimizer import Moments
from penstock.doctor.pace import Load
from penstock.hardware import system
from penstock.optim import kernels
from penstock.optim.codes import GROUP, Codes, Moment
from penstock.optim.crossing import copy_cast
from penstock.optim.formula import Hyper, Kind
from penstock.runtime.access import copy
from penstock.schedule.place import FP32
from penstock.state.memory import DeviceSlab, HostSlab
from penstock.state.numa import near

CHUNK = 2 << 20
"""Elements of a usual chunk; 8 MiB of fp32."""
DEVICE_STEP = 8 * CHUNK
"""Elements of a step on a GPU, where the engine steps a whole param group at a time."""
_ROUND = 16
"""Chunks that a copy walks through at least: 128 MiB on either side."""
QUEUED = 8
"""Copies to or from a GPU, or steps on it, that are queued before they are waited for, as lanes do."""
_OVER_CACHES = 256 << 20
"""Bytes of a copy in a device's memory: no device's caches hold as many."""
_PART = 64
"""The part of free memory that one kind of work may walk through: five kinds at once on the device and the host, and
three on each of eight ranks, leave more than half of it."""
_STATES = 4
"""Chunks of optimizer state that are walked through at least; 128 MiB for AdamW in fp32."""
_GRADIENT = 0.0010011944686993957
"""Both halves of its fp32 are the bf16 nearest to it, so that its bytes are gradients of that size in either dtype."""


def _round(length: int) -> Iterator[int]:
    return itertools.cycle(range(length))


def _beyond_cache(at_least: int, nbytes: int) -> int:
    """Pieces of ``nbytes`` to walk through so that none is in a cache when its turn comes again.

    They are a small part of free memory, since lanes and ranks walk through pieces of their own at the same time.
    """
    wanted = min(2 * system.cache_size(), system.look().available // _PART)
    return max(at_least, -(-wanted // nbytes))


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[at : at + CHUNK * FP32] for at in range(0, flat.numel(), CHUNK * FP32)]


def _both_sides(device: torch.device, closing: ExitStack) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Bytes of chunks in host memory, page-locked beside a GPU, and on the device."""
    nbytes = _beyond_cache(_ROUND, CHUNK * FP32) * CHUNK * FP32
    with near(device):
        host_slab = HostSlab(nbytes, beside=device)
        device_slab = DeviceSlab(nbytes, device)
        host_slab.bytes.fill_(1)
        device_slab.bytes.fill_(1)
    closing.callback(host_slab.close)
    return _pieces(host_slab.bytes), _pieces(device_slab.bytes)


def _moving(name: str, device: torch.device, move: Callable[[int], None], amount: float) -> Load:
    """The work of a lane between host and device: ``move(i)`` moves chunk i, which is ``amount``."""
    place = _round(_beyond_cache(_ROUND, CHUNK * FP32))
    if device.type == "cpu":
        return Load(name=name, workers=[lambda: move(next(place))], amount=amount)
    its = accelerator.of(device)
    stream = its.stream(device)
    stream.wait_stream(its.current_stream(device))  # on which what is moved, and what it goes through, was made

    def queued() -> None:
        with its.queued_on(stream):
            for _ in range(QUEUED):
                move(next(place))
        stream.synchronize()

    return Load(name=name, workers=[queued], amount=QUEUED * amount)


def copies(name: str, device: torch.device, closing: ExitStack) -> Load:
    """Copies between host and device, in the direction that ``name`` says (``h2d``, ``d2h``); bytes.

    ``closing`` gives page-locked memory back when it ends.
    """
    host, there = _both_sides(device, closing)
    targets, sources = (there, host) if name == "h2d" else (host, there)
    return _moving(name, device, lambda i: copy(targets[i], sources[i]), CHUNK * FP32)


def crossings(device: torch.device, closing: ExitStack) -> tuple[Load, ...]:
    """Gradients from the device, in bf16 and in fp32; parameters.

    Named as the fields of ``penstock.hardware.machine.Crossing``. ``closing``: as in ``copies``.
    """
    host, there = _both_sides(device, closing)
    host_wide, there_wide = ([piece.view(torch.float32) for piece in side] for side in (host, there))
    host_narrow = [piece.view(torch.bfloat16)[:CHUNK] for piece in host]
    narrow = None if device.type == "cpu" else torch.empty(CHUNK, dtype=torch.bfloat16, device=device)
    moves: dict[str, Callable[[int], None]] = {
        "grad_bf16": lambda i: copy_cast(host_narrow[i], there_wide[i], narrow),
        "grad_fp32": lambda i: copy(host_wide[i], there_wide[i]),
    }
    return tuple(_moving(name, device, move, CHUNK) for name, move in moves.items())


def host_copies() -> Load:
    """Copies in host memory with torch's threads, which is how what lives there gets in and out of buffers; bytes."""
    count = _beyond_cache(_ROUND, CHUNK * FP32)
    sources, targets = (HostSlab(count * CHUNK * FP32) for _ in range(2))
    sources.bytes.fill_(1)
    targets.bytes.fill_(1)
    place = _round(count)

    def one() -> None:
        part = slice((i := next(place)) * CHUNK * FP32, (i + 1) * CHUNK * FP32)
        targets.bytes[part].copy_(sources.bytes[part])

    return Load(name="copy", workers=[one], amount=CHUNK * FP32)


def device_copies(device: torch.device) -> Load:
    """Copies in the memory of a device that is not the CPU, each of more than its caches hold; bytes."""
    nbytes = min(_OVER_CACHES, accelerator.of(device).memory(device)[0] // 8)
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def queued() -> None:
        for _ in range(QUEUED):
            target.copy_(source)
        wait_for(device)

    return Load(name="copy", workers=[queued], amount=QUEUED * nbytes)


def product(device: torch.device, dtype: torch.dtype, size: int) -> Load:
    """A product of two square matrices, of which the second is transposed as a layer's weight is; FLOP."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)

    def one() -> None:
        wait_for(device)  # a thread whose first call of CUDA is cuBLAS's is warned
        torch.mm(a, b.t(), out=out)
        wait_for(device)

    return Load(name="compute", workers=[one], amount=2 * size**3)


def layer(device: torch.device) -> Load:
    """Forward and backward of a small block: products, and what is bound by memory between them; blocks."""
    width, tokens = (512, 128) if device.type == "cpu" else (4096, 4096)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    up, down = torch.randn(4 * width, width, device=device), torch.randn(width, 4 * width, device=device)
    weights = [w.mul_(0.01).to(dtype).requires_grad_() for w in (up, down)]
    x = torch.randn(tokens, width, device=device).to(dtype)

    def one() -> None:
        hidden = F.gelu(F.linear(F.layer_norm(x, (width,)), weights[0]))
        torch.autograd.grad((x + F.linear(hidden, weights[1])).square().mean(), weights)
        wait_for(device)

    return Load(name="compute", workers=[one], amount=1)


def wait_for(device: torch.device) -> None:
    """Return when what was queued on a GPU is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _of_form(form: Moments, n: int, *kept: torch.Tensor) -> tuple[Moment, ...]:
    """Both moments of n elements in a form, in memory with room for fp32 ones."""
    if form == "fp32":
        return kept
    if form == "bf16":
        return tuple(memory.view(torch.bfloat16)[:n] for memory in kept)
    return tuple(
        Codes(codes=memory.view(dtype)[:n], scales=memory.view(torch.int16)[n // 2 : n // 2 + n // GROUP])
        for memory, dtype in zip(kept, (torch.int8, torch.uint8), strict=True)
    )


class Steps:
    """Optimizer steps on one chunk after the other, with gradient and state in memory like the engine's."""

    def __init__(self, device: torch.device, *, threads: int) -> None:
        self._device = device
        self._threads = threads
        self._numel = CHUNK if device.type == "cpu" else DEVICE_STEP
        values = (_GRADIENT, 1.0, 0.0, 1e-6, _GRADIENT)
        count = _beyond_cache(_STATES, len(values) * CHUNK * FP32) if device.type == "cpu" else _STATES
        self.states = [[self._array(value) for value in values] for _ in range(count)]

    def _array(self, value: float) -> torch.Tensor:
        return DeviceSlab(self._numel * FP32, self._device).bytes[: self._numel * FP32].view(torch.float32).fill_(value)

    def load(
        self,
        kind: Kind,
        out: torch.dtype | None = None,
        *,
        grad: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        moments: Moments = "fp32",
        name: str = "cpu",
    ) -> Load:
        """Steps of one optimizer; parameters.

        ``out``: dtype of the weights, if it is not fp32: bf16 ones are half of the master copy. ``grad``: dtype of the
        gradient in memory; ``grad_dtype``: what it is rounded to as it is read. ``moments``: their form.
        """
        hyper = Hyper(kind=kind, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
        place, count, numel = _round(len(self.states)), itertools.count(1), self._numel
        queued = 1 if self._device.type == "cpu" else QUEUED

        def one() -> None:
            for _ in range(queued):
                step()
            wait_for(self._device)

        def step() -> None:
            gradient, master, first, second, copied = self.states[next(place)]
            kernels.step(
                hyper,
                next(count),
                grad=gradient.view(grad)[:numel],
                weights=master if out is None else copied.view(out)[:numel],
                rest=None if out is None else master.view(torch.int16)[:numel] if out == torch.bfloat16 else master,
                moments=_of_form(moments, numel, first, second)[: hyper.moments],
                grad_dtype=grad_dtype,
                threads=self._threads,
            )

        return Load(name=name, workers=[one], amount=queued * numel)

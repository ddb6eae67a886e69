"""The simulated accelerator as a device of PyTorch's and of the engine's: ``start`` makes it one, once in a process."""

import ctypes
import inspect
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from types import ModuleType

import torch

from penstock import accelerator
from tests.accelerator import build

NAME = "sim"
MEMORY = 2 << 30
"""Bytes of the device's memory."""
BESIDE_PLANS = 1 << 20
"""Bytes that training takes of it besides what a plan counts."""
_FRAMES = 6
"""Innermost calls that a finding names."""
_WATCHING = str(Path(__file__).with_name("watching.py"))
_UNNAMED = (__file__, _WATCHING, threading.__file__, f"{Path(torch.__file__).parent}/")
"""files whose calls it leaves out"""
_ASK = ctypes.CFUNCTYPE(None)


def _where() -> str:
    """The place in the code of the calling thread, as findings say it: autograd's threads have none."""
    calls = (
        f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_stack(inspect.currentframe())
        if not frame.f_code.co_filename.startswith(_UNNAMED)
    )
    found = " < ".join(islice(calls, _FRAMES))
    return f", at {found} in {threading.current_thread().name}" if found else ""


class Simulated:
    """The backend's own controls, and what ``penstock.accelerator.Accelerator`` asks for."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL(str(build.library()))
        pointer, size, text = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p
        for name, arguments, result in (
            ("sim_start", (), None),
            ("sim_limit", (size,), None),
            ("sim_patience", (ctypes.c_double, size), None),
            ("sim_lock_pages", (pointer, size), ctypes.c_int),
            ("sim_unlock_pages", (pointer,), ctypes.c_int),
            ("sim_host_access", (pointer, size, ctypes.c_int, text), None),
            ("sim_tell", (size,), None),
            ("sim_hear", (size,), None),
            ("sim_close_gate", (), size),
            ("sim_open_gate", (size,), None),
            ("sim_meet_autograd", (), None),
            ("sim_ask_where", (_ASK,), None),
            ("sim_say_where", (text,), None),
            ("sim_label", (text,), None),
            ("sim_findings", (), text),
            ("sim_counts", (), text),
            ("sim_clear", (), text),
        ):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        self._asked = _ASK(lambda: library.sim_say_where(_where().encode()))  # kept: the library has its address
        library.sim_ask_where(self._asked)
        self.refuses_pages = False
        """True if page-locking fails, as it does past a limit."""

    # ---- what the engine asks for

    def count(self) -> int:
        return 1

    def stream(self, device: torch.device) -> torch.Stream:
        return torch.Stream(device)

    def current_stream(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @contextmanager
    def queued_on(self, stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def selected(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()  # it is the only one

    def event(self, *, timed: bool = False) -> torch.Event:
        return torch.Event(NAME, enable_timing=timed)

    def lock_pages(self, device: torch.device, address: int, nbytes: int) -> int:
        if self.refuses_pages:
            return 2
        return int(self._library.sim_lock_pages(address, nbytes))

    def unlock_pages(self, device: torch.device, address: int) -> None:
        self._library.sim_unlock_pages(address)

    def name(self, device: torch.device) -> str:
        return "Simulated"

    def memory(self, device: torch.device) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(device)

    def beside_plans(self, device: torch.device) -> int:
        return BESIDE_PLANS

    def pci_address(self, device: torch.device) -> str | None:
        return None

    # ---- controls

    def begin(self) -> None:
        """There is a device from here on."""
        self._library.sim_start()

    def limit(self, nbytes: int) -> None:
        """How much memory the device has."""
        self._library.sim_limit(nbytes)

    def patience(self, microseconds: float | None, seed: int = 0) -> None:
        """How long an op waits at most that nobody waits for; None: until somebody does."""
        self._library.sim_patience(-1.0 if microseconds is None else microseconds, seed)

    def host_access(self, address: int, nbytes: int, what: str, *, writes: bool) -> None:
        """The calling thread touches memory; of what is page-locked it is compared with what streams do."""
        self._library.sim_host_access(address, nbytes, writes, what.encode())

    def tell(self, key: int) -> None:
        """What this thread has done, and knows to be over, is known to whoever ``hear``s the key from now on."""
        self._library.sim_tell(key)

    def hear(self, key: int) -> None:
        self._library.sim_hear(key)

    def close_gate(self) -> int:
        """The current stream does not go on until the gate, of this number, is opened."""
        return int(self._library.sim_close_gate())

    def open_gate(self, gate: int) -> None:
        """The stream that waits for the gate goes on, once; a gate may be opened again."""
        self._library.sim_open_gate(gate)

    def meet_autograd(self) -> None:
        """A backward of the calling thread begins or ends: autograd's threads work for it."""
        self._library.sim_meet_autograd()

    def label(self, text: str) -> None:
        """What the calling thread does is named so in findings."""
        self._library.sim_label(text.encode())

    def findings(self) -> list[str]:
        """Pairs of accesses that nothing orders, and asynchronous copies that were none; with the place in the code
        of the later one."""
        return self._library.sim_findings().decode().splitlines()  # type: ignore[no-any-return]

    def counts(self) -> dict[str, int]:
        """How often the host has waited, and for what; copies; kernels."""
        lines = self._library.sim_counts().decode().splitlines()
        return {what: int(n) for n, _, what in (line.partition(" ") for line in lines)}

    def clear(self) -> list[str]:
        """Wait for everything and forget what was seen; what kernels have failed with since somebody last waited."""
        return self._library.sim_clear().decode().splitlines()  # type: ignore[no-any-return]


_started: Simulated | None = None


def start() -> Simulated:
    """Make it a device. Before the first backward of the process, which finds out what devices there are."""
    global _started
    if _started is not None:
        return _started
    torch.utils.rename_privateuse1_backend(NAME)
    sim = Simulated()
    sim.begin()
    sim.limit(MEMORY)
    generator = torch.ops.penstock_sim.generator()
    module = ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device=lambda device: nullcontext(),
        default_generators=(generator,),
        manual_seed=generator.manual_seed,
        manual_seed_all=generator.manual_seed,
        get_rng_state=lambda device=None: generator.get_state(),
        set_rng_state=lambda state, device=None: generator.set_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    accelerator.KINDS[NAME] = sim
    _started = sim
    return sim


@contextmanager
def patient(microseconds: float | None, seed: int = 0) -> Iterator[None]:
    """Within, ops run at random moments, too."""
    start().patience(microseconds, seed)
    try:
        yield
    finally:
        start().patience(None)

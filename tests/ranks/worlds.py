"""Several ranks in processes of their own, as torchrun starts them, from the server that has imported torch."""

import io
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ConfigError, ModelError, RankError
from tests.accelerator import DEVICE
from tests.patience import PATIENCE, until
from tests.warm import server

P = ParamSpec("P")
R = TypeVar("R")


class RankFailedError(AssertionError):
    """A rank has raised an error. ``kind`` and ``said`` are its own."""

    def __init__(self, rank: int, kind: str, said: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {said}\n{trace}")
        self.rank, self.kind, self.said = rank, kind, said


class World:
    """Ranks that run ``what(mesh, ...)``, whose mesh has one ``axis``. ``on_device``: each has an accelerator, a GPU or
    a simulated one. ``processes`` are there to be killed."""

    def __init__(
        self,
        size: int,
        what: Callable[..., Any],
        *args: Any,
        axis: str = "dp_shard",
        on_device: bool = False,
        **given: Any,
    ) -> None:
        self.size = size
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # that of torchrun's agent
        self._store = store
        self.processes: list[BaseProcess] = []
        self._ends: list[Connection] = []
        context = server()
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            words = (rank, size, axis, on_device, store.port, theirs, what, args, given)
            process = context.Process(target=_rank, args=words)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(mine)

    def joined(self) -> None:
        """Returns when all have joined torch's group. Until then whoever waits for one that is killed is torch's to
        tell, and torchrun's to end."""
        until(lambda: self._store.add("joined", 0) == self.size)

    def outcomes(self) -> list[Any]:
        """What each rank has returned; a ``RankFailedError`` where it has raised, None where it was killed."""
        found: list[Any] = [None] * self.size
        left = {end: rank for rank, end in enumerate(self._ends)}
        while left:
            ready = wait(list(left), timeout=PATIENCE)
            assert ready, f"ranks {sorted(left.values())} do not end"
            for end in ready:
                assert isinstance(end, Connection)
                rank = left.pop(end)
                try:
                    ok, *said = torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
                except (EOFError, OSError):  # it was killed, perhaps while it told
                    continue
                found[rank] = said[0] if ok else RankFailedError(rank, *said)
        for process in self.processes:
            process.join()
        return found


def together(size: int, what: Callable[Concatenate[DeviceMesh, P], R], *args: P.args, **given: P.kwargs) -> list[R]:
    """``what(mesh, ...)`` on ``size`` ranks; what each returns.

    Raises:
        RankFailedError: what the first rank has raised, of those that did not fail for another's sake.
    """
    return _settled(World(size, what, *args, **given))


def pipeline(size: int, what: Callable[..., R], *args: Any, **given: Any) -> list[R]:
    """``together``, of the ranks of a pipeline."""
    return _settled(World(size, what, *args, axis="pp", **given))


def sharing(size: int, what: Callable[..., R], *args: Any, **given: Any) -> list[R]:
    """``together``, of ranks that share each sequence."""
    return _settled(World(size, what, *args, axis="cp", **given))


def refusals(mesh: DeviceMesh, what: Callable[..., Any], cases: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """On a rank: kind and words of the error that ``what(mesh, ...)`` raises in each case, one after the other; of that
    of another rank, where that alone has failed."""
    found = []
    for case in cases:
        try:
            what(mesh, **case)
        except (ConfigError, ModelError, RankError) as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("none", f"{case} is not refused"))
    return found


def own_refusals(found: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Of each case the error of the first rank that did not fail for another's sake. ``found``: ``refusals``, by
    rank."""
    for of_rank in found:
        assert all(kind != "none" for kind, _ in of_rank), of_rank
    return [min(case, key=lambda refusal: refusal[0] == "RankError") for case in zip(*found, strict=True)]


def _settled(world: World) -> list[Any]:
    found = world.outcomes()
    failed = sorted((f for f in found if isinstance(f, RankFailedError)), key=lambda f: f.kind == "RankError")
    if failed:
        raise failed[0]
    return found


def _rank(
    rank: int,
    size: int,
    axis: str,
    on_device: bool,
    port: int,
    end: Connection,
    what: Callable[..., Any],
    args: Any,
    given: Any,
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    try:
        kind, check = _device(rank) if on_device else ("cpu", lambda: None)
        try:
            backend = dist.get_default_backend_for_device(kind)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
            )
            mesh = init_device_mesh(kind, (size,), mesh_dim_names=(axis,))
            store.add("joined", 1)
            until(lambda: store.add("joined", 0) == size)  # one that ends would close what others still connect to
        except RuntimeError as error:  # torch's own: another rank was killed
            raise RankError(str(error)) from error
        said: tuple[Any, ...] = (True, what(mesh, *args, **given))
        check()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test is told
        said = (False, type(error).__name__, str(error), traceback.format_exc())
    text = io.BytesIO()
    torch.save(said, text)
    end.send_bytes(text.getvalue())


def _device(rank: int) -> tuple[str, Callable[[], None]]:
    """The kind of this rank's accelerator, which is there from now on, and what finds out whether all was in order."""
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        return DEVICE, lambda: None
    from tests.accelerator import collectives, simulated, watching

    sim = simulated.start()
    watching.install(sim)
    collectives.register()

    def check() -> None:
        findings, failed = sim.findings(), sim.clear()
        if findings or failed:
            raise AssertionError("\n".join(["found by the simulated accelerator:", *findings[:20], *failed]))

    return DEVICE, check

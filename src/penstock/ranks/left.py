"""Process groups that are used again."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.ranks.axes import axes_of


class Left:
    """Process groups that closed engines have left, of one kind of ranks, for the next one of that kind: torch gives
    the name of a group that is destroyed to another one, which would find the old one's addresses."""

    _of_kinds: ClassVar[dict[str, "Left"]] = {}

    def __init__(self) -> None:
        self._world: Any = None
        self._groups: dict[int, list[dist.ProcessGroup]] = {}

    @staticmethod
    def of(mesh: DeviceMesh, device: torch.device) -> "Left":
        found = Left._of_kinds.setdefault(f"{axes_of(mesh)} on {device}", Left())
        if found._world is not dist.group.WORLD:  # torch's groups were made anew
            found._world, found._groups = dist.group.WORLD, {}
        return found

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the ``Together`` whose groups are there."""
        return tuple(self._groups)

    def taken(self, numbers: Sequence[Sequence[int]]) -> list[dist.ProcessGroup]:
        """The groups of one that all ranks have. ``numbers``: of each rank."""
        common = set(numbers[0]).intersection(*numbers)
        return self._groups.pop(max(common)) if common else []

    def put(self, number: int, groups: list[dist.ProcessGroup]) -> None:
        self._groups[number] = groups

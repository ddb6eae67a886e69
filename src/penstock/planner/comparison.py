"""All layouts in which the ranks of some hosts may train a model, beside each other: ``penstock plan --hosts``."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.config import ZeroStage
from penstock.config.step import check_copies
from penstock.errors import BudgetError, ConfigError
from penstock.planner.layouts import Asked, Layout, Outcome, shared_by_all
from penstock.planner.pipelines import pipeline

_STAGES: tuple[ZeroStage, ...] = (3, 2, 0)
"""1 is 2 for ranks that stream."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A layout that cannot be, and why. ``fits``: it is not for want of memory or drives."""

    layout: Layout
    why: str
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Layouts that fit, the fastest first, and those that do not."""

    asked: Asked
    outcomes: tuple[Outcome, ...]
    refused: tuple[Refused, ...]

    @cached_property
    def fastest(self) -> Outcome | None:
        """None: none fits."""
        return next(iter(self.outcomes), None)

    @cached_property
    def json(self) -> dict[str, Any]:
        """Everything as plain data, in seconds, bytes and tokens."""
        from penstock.planner.as_json import comparison_as_json

        return comparison_as_json(self)


def compared(asked: Asked) -> Comparison:
    """Plan and simulate every layout."""
    outcomes: list[Outcome] = []
    refused: list[Refused] = []
    for layout in layouts(asked):
        try:
            outcomes.append(pipeline(asked, layout) if layout.kind == "pipeline" else shared_by_all(asked, layout))
        except (BudgetError, ConfigError) as error:
            refused.append(Refused(layout=layout, why=str(error), fits=not isinstance(error, BudgetError)))
    outcomes.sort(key=lambda one: one.seconds)
    return Comparison(asked=asked, outcomes=tuple(outcomes), refused=tuple(refused))


def layouts(asked: Asked) -> Iterator[Layout]:
    """The layouts that there are for the hosts, in the stages that are asked for, if any are."""
    hosts, stage, cp = asked.hosts, asked.task.stage, asked.cp
    stages = _STAGES if stage is None else (stage,)
    for each in stages:
        yield Layout(kind="shared", ranks=hosts.ranks, cp=cp, stage=each)
    if hosts.count > 1 and hosts.each > 1 and _may_have_copies(asked):
        for each in stages:
            if each:
                yield Layout(kind="copies", ranks=hosts.ranks, cp=cp, stage=each, copies=hosts.count)
    if stage is None:
        of_hosts = [hosts.count] if hosts.count > 1 and hosts.each > 1 else []
        for places in dict.fromkeys((hosts.ranks, *_most_places(asked), *of_hosts)):
            yield Layout(kind="pipeline", ranks=hosts.ranks, cp=cp, stages=places)


def _most_places(asked: Asked) -> list[int]:
    """The most places of a pipeline that the model has blocks for, where it has not for as many as there are ranks, if
    there are any: so many that each is on one host, or on several that are alike."""
    hosts = asked.hosts
    try:
        program = asked.task.profile(asked.size or 1).program
    except ConfigError:  # which each layout is refused for
        return []
    blocks = sum(stage.kind == "call" for stage in program.stages)

    def is_on_whole_hosts(beside: int) -> bool:
        return not hosts.each % beside or (hosts.alike and not beside % hosts.each)

    fewer = range(min(blocks + 1, hosts.ranks - 1), 1, -1) if blocks + 1 < hosts.ranks else ()
    return [n for n in fewer if not hosts.ranks % n and is_on_whole_hosts(hosts.ranks // n)][:1]


def _may_have_copies(asked: Asked) -> bool:
    try:
        check_copies(asked.hosts.count, asked.hosts.ranks)
    except ConfigError:
        return False
    return True

"""Ranks of a pipeline that are alike: what each has is what another has, with the numbers of other stages, groups and
ranks.

``likeness`` is of what decides about a rank's plan. ``passing`` is of the order in which messages come to it, and of
what comes; ranks that have both, and settings, in common do the same, op by op: one schedule stands for all of them,
whose messages have other channels on each (``channels_of``).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock.schedule.ir.ops import Schedule
from penstock.schedule.ir.worlds import Channel, channel_of
from penstock.schedule.lower.messages import ahead_of_outputs
from penstock.schedule.program import Dealt, Program, Stage


def own_stages(program: Program) -> list[Stage]:
    """The stages that a rank of a pipeline has."""
    dealt = program.dealt
    assert dealt is not None
    return [program.stages[k] for k in dealt.own]


def likeness(program: Program) -> object:
    """A key of what decides about the plan of a rank: its groups in their order, also those that no stage uses; its
    stages in theirs, with what each does with which of these; and what crosses around them."""
    dealt = program.dealt
    assert dealt is not None
    held = [group for group in program.groups if group.numel]
    number = {group.index: n for n, group in enumerate(held)}

    def renumbered(stage: Stage) -> Stage:
        uses = (stage.forward_reads, stage.backward_reads, stage.gradients)
        reads, back, made = (tuple([number[g] for g in use if g in number]) for use in uses)
        return replace(stage, index=0, name="", forward_reads=reads, backward_reads=back, gradients=made)

    return tuple(replace(group, index=0, name="") for group in held), tuple(
        (
            renumbered(stage),
            k > 0 and dealt.crosses(k - 1),
            dealt.crosses(k),
            dealt.besides[k],
            k in (0, len(program.stages) - 2, len(program.stages) - 1),
        )
        for stage in own_stages(program)
        for k in (stage.index,)
    )


def passing(program: Program) -> object:
    """A key of the messages around a rank's stages, in one order of forwards and then backwards (vertical)."""
    dealt, own = program.dealt, own_stages(program)
    assert dealt is not None
    before = (program.stages[stage.index - 1] for stage in own if stage.index)
    return (
        tuple((stage.activation, stage.gradient) for stage in before),
        tuple(ahead_of_outputs(dealt, stage.index) for stage in own if dealt.rank and dealt.besides[stage.index]),
    )


def neighbours(dealt: Dealt) -> Iterator[int]:
    """The ranks that messages go to and come from around a rank's stages, in the order of these; not those of what is
    besides."""
    for k in dealt.own:
        yield from (dealt.of_stages[k - 1],) if k and dealt.crosses(k - 1) else ()
        yield from (dealt.of_stages[k + 1],) if dealt.crosses(k) else ()


def channels_in(schedule: Schedule) -> dict[Channel, int]:
    """The channels of a schedule's messages, with the bytes that it sends in each."""
    found = Counter[Channel]()
    for lane in ("send", "recv"):
        for op in schedule.lanes.get(lane, ()):
            found[channel_of(op)] += op.nbytes * (lane == "send")
    return found


def channels_of(program: Program, like: Program, channels: Iterable[Channel]) -> dict[Channel, Channel]:
    """The ``channels`` of the schedule of the rank that a rank is ``like``, each as it is on the rank itself."""
    dealt = program.dealt
    assert dealt is not None
    pairs = zip(own_stages(like), own_stages(program), strict=True)
    here = {theirs.index: own.index for theirs, own in pairs}

    def moved(channel: Channel) -> Channel:
        if channel.stage in here:
            stage = here[channel.stage]
            return channel._replace(stage=stage, peer=0 if channel.what == "X" else dealt.of_stages[stage + 1])
        stage = here[channel.stage + 1] - 1
        return channel._replace(stage=stage, peer=dealt.of_stages[stage])

    return {channel: moved(channel) for channel in channels}

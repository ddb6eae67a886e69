"""A program of equal blocks, from a few sizes: what a schedule looks like when no model is meant in particular."""

from penstock.schedule.program import ALIGN, GroupSpec, Program, Stage, round_up


def uniform_program(
    layers: int,
    *,
    block: int,
    embedding: int = 0,
    head: int = 0,
    activation: int = 0,
    working: int = 0,
    splits: bool = True,
    graph: int | None = None,
) -> Program:
    """``layers`` blocks between an embedding and a head.

    ``block``, ``embedding``, ``head``: parameters of each, rounded up to multiples of ``ALIGN``; no end group for 0.
    ``activation``: bytes of the activations between two blocks for one micro-batch, and of the gradient with respect to
    them. ``working``: bytes of a block's temporaries, forward and backward. ``splits``: backwards can be run in two
    parts. ``graph``: bytes of what a block's graph holds; None: it cannot be kept.

    A transformer block of width h has about 12 h**2 parameters, and b sequences of s tokens a bf16 saved activation of
    2 b s h bytes.
    """
    assert layers >= 1
    assert block >= 1
    groups: list[GroupSpec] = []

    def group(name: str, parameters: int) -> tuple[int, ...]:
        if not parameters:
            return ()
        groups.append(GroupSpec(index=len(groups), name=name, trainable=round_up(parameters, ALIGN), frozen=0))
        return (groups[-1].index,)

    first, last = group("embedding", embedding), group("head", head)

    def end(index: int, name: str, reads: tuple[int, ...], out: int) -> Stage:
        return Stage(
            index=index,
            kind="segment",
            name=name,
            forward_reads=reads,
            backward_reads=reads if name == "epilogue" else (),
            gradients=reads,
            activation=out,
            gradient=out,
            kept=0,
            forward_peak=0,
            backward_peak=0,
        )

    def call(i: int) -> Stage:
        reads = group(f"block{i}", block)
        return Stage(
            index=i + 1,
            kind="call",
            name=f"block{i}",
            forward_reads=reads,
            backward_reads=reads,
            gradients=reads,
            activation=activation,
            gradient=activation,
            kept=0,
            forward_peak=working,
            backward_peak=working,
            split=2 * activation + ALIGN if splits else None,
            split_peak=(2 * activation + ALIGN + working) * splits,
            graph=graph,
        )

    calls = tuple(call(i) for i in range(layers))
    stages = (end(0, "prologue", first, activation), *calls, end(layers + 1, "epilogue", last, 0))
    return Program(groups=tuple(groups), stages=stages)

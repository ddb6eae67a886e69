"""Layers that are alike, as a program of unit costs on devices that hold all of their parts.

A layer is a stage with a param group of its own, of one element; the loss is the last stage, without parameters. How
large anything is follows from ``Sizes``, in whatever unit, and pools have as many buffers as are held at once.
"""

from collections.abc import Iterator

from penstock.config import Tier
from penstock.schedule.ir.ops import Pool
from penstock.schedule.lower.fixed import Fixed
from penstock.schedule.lower.provision import Provision
from penstock.schedule.lower.request import Sizes
from penstock.schedule.lower.route import Route
from penstock.schedule.lower.seat import Seat
from penstock.schedule.place import Depths, Format, Placement, Settings
from penstock.schedule.program import GroupSpec, Program, Stage


def layer_program(sizes: Sizes, layers: int) -> Program:
    """``layers`` stages that read and train a group each, and the loss."""

    def stage(index: int) -> Stage:
        own = (index,) if index < layers else ()
        return Stage(
            index=index,
            kind="call" if 0 < index < layers else "segment",
            name=f"layer{index}" if own else "loss",
            forward_reads=own,
            backward_reads=own,
            gradients=own,
            activation=sizes.activation if own else 0,
            gradient=sizes.activation_gradient if own else 0,
            kept=sizes.saved if own else 0,
        )

    groups = tuple(GroupSpec(index=n, name=f"layer{n}", trainable=1, frozen=0) for n in range(layers))
    return Program(groups=groups, stages=tuple(map(stage, range(layers + 1))))


def layer_settings(layers: int, micro_batches: int) -> Settings:
    """Everything on the device, whole layers, no norm, and no weights that stay from one use to the next."""
    device: Tier = "device"
    there = (device,) * layers
    return Settings(
        micro_batches=micro_batches,
        chunk=0,
        form=Format.of("bf16", 2),
        place=Placement(weights=there, state=there, gradients="host", activations="device"),
        depths=Depths(weights=0),
        wait=False,
    )


def activation_pools(sizes: Sizes, items: int) -> dict[str, int]:
    """Size of a buffer of each pool that holds something of ``items`` micro-batches."""
    return {
        "activations": sizes.activation * items,
        "received_activations": sizes.activation * items,
        "saved": sizes.saved * items,
        "activation_gradients": sizes.activation_gradient * items,
        "received_gradients": sizes.activation_gradient * items,
    }


class LayerProvision(Provision):
    """The pools of a rank that holds layers of these ``sizes``. Their counts are left to an emitter that counts."""

    def __init__(self, route: Route, settings: Settings, seat: Seat, sizes: Sizes) -> None:
        self._sizes = sizes
        super().__init__(route, settings, seat)
        self.gradient_parts_pool = "gradient_shards"
        self.weights_pool = dict.fromkeys(route.readers, "weights")
        self.gradients_pool = dict.fromkeys(route.gradient_visits, "gradients")

    def whole_weights(self, g: int) -> int:
        return self._sizes.weights

    def whole_gradient(self, g: int) -> int:
        return self._sizes.gradient

    def moves(self, g: int) -> bool:
        return self.seat.sharding.weights

    def fixed(self, layers: int) -> Fixed:
        """The memory that a rank with its part of so many layers holds all the time."""
        cut, share, sizes = self.seat.sharding, self.seat.shards.share, self._sizes
        return (
            ("device", "weights", layers * (share(sizes.weights) if cut.weights else sizes.weights)),
            ("device", "state", layers * (share(sizes.state) if cut.state else sizes.state)),
        )

    def _all(self) -> Iterator[Pool]:
        seat, sizes = self.seat, self._sizes
        pools = activation_pools(sizes, seat.items) | {
            "activation_shards": seat.model.share(sizes.activation * seat.items),
            "gathered_activations": sizes.activation * seat.items,
            "weights": sizes.weights,
            "gradients": sizes.gradient,
            "gradient_shards": seat.shards.share(sizes.gradient),
            "buffers": seat.sharding.piece or 0,
        }
        for name, size in pools.items():
            yield Pool(name=name, tier="device", size=size, count=0, backed=False)

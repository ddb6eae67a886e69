"""The colours of ops by what they are for: those of the page, which is told them, and of the picture.

Told apart without red and green, after Okabe and Ito.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Group:
    """Kinds of ops (``OpId.kind``) that share a colour, on white and in the dark."""

    name: str
    kinds: tuple[str, ...]
    light: str
    dark: str


def _group(name: str, kinds: str, light: str, dark: str) -> Group:
    return Group(name=name, kinds=tuple(kinds.split()), light=light, dark=dark)


GROUPS: tuple[Group, ...] = (
    _group("forward", "F", "#56a5dc", "#56b4e9"),
    _group("recompute and backward", "B I W", "#14679f", "#2b86c6"),
    _group("last stage and loss", "E", "#0a3a5e", "#a9d7f5"),
    _group("weights", "RW UW WW UN DP UP", "#e69f00", "#f0b429"),
    _group("gradients", "AD DG AG UG WG RG", "#cf4f13", "#ee7440"),
    _group("optimizer state and step", "RS WS OP OD CM RM WM MU UU NS DU", "#0c8f68", "#22b58a"),
    _group("saved activations", "DC WC RC UC", "#b8649a", "#d98cbb"),
    _group("gradient norm", "NG ND NORM", "#6b7280", "#9aa3b2"),
    _group("collectives", "GW GN AR SG GC GU AN HW HG HU HR", "#4b5563", "#c3cad6"),
    _group("send and receive", "SA SD SX RA RD RX", "#8a93a3", "#8a93a3"),
)
OTHER = _group("other", "", "#9ca3af", "#6b7280")
"""For an id that is no op's, as in a trace of another version."""

GROUP_OF: Mapping[str, Group] = {kind: group for group in GROUPS for kind in group.kinds}

"""Random models that keep something from one stage, or one micro-batch, to the next: in a place of any kind.

A ``Spec`` says in which place, what is put there, and which stages look at it or change it. ``source`` is such a model
as a program, as a user would write it: what a model's own code reaches is found by looking at that code.
"""

import random
import types
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

WIDTH, WORDS = 8, 11

PLACES: dict[str, tuple[str, str, str]] = {
    "attribute": ("self.kept = 0.0", "m.kept", "m.kept = {}"),
    "attribute of a part": ("self.part = nn.Module(); self.part.kept = 0.0", "m.part.kept", "m.part.kept = {}"),
    "attribute of a block": ("self.blocks[1].kept = 0.0", "m.blocks[1].kept", "m.blocks[1].kept = {}"),
    "property": ("self._kept = 0.0", "m.kept", "m.kept = {}"),
    "tuple": ("self.kept = (0.0,)", "m.kept[0]", "m.kept = ({},)"),
    "new list": ("self.kept = [0.0]", "m.kept[0]", "m.kept = [{}]"),
    "new dict": ("self.kept = {'v': 0.0}", "m.kept['v']", "m.kept = {{**m.kept, 'v': {}}}"),
    "new object": ("self.kept = types.SimpleNamespace(v=0.0)", "m.kept.v", "m.kept = types.SimpleNamespace(v={})"),
    "list": ("self.kept = [0.0]", "m.kept[0]", "m.kept[0] = {}"),
    "log": ("self.kept = [0.0]", "m.kept[-1]", "m.kept.append({})"),
    "deque": ("self.kept = deque([0.0], maxlen=3)", "m.kept[-1]", "m.kept.append({})"),
    "dict": ("self.kept = {}", "m.kept.get('v', 0.0)", "m.kept['v'] = {}"),
    "updated dict": ("self.kept = {'v': 0.0}", "m.kept['v']", "m.kept.update(v={})"),
    "default dict": ("self.kept = defaultdict(float)", "m.kept['v']", "m.kept['v'] = {}"),
    "object": ("self.kept = types.SimpleNamespace(v=0.0)", "m.kept.v", "m.kept.v = {}"),
    "slot": ("self.kept = Slotted()", "m.kept.v", "m.kept.v = {}"),
    "object in a list": (
        "self.kept = {'a': [types.SimpleNamespace(v=0.0)]}",
        "m.kept['a'][0].v",
        "m.kept['a'][0].v = {}",
    ),
    "class": ("Kept.v = 0.0", "Kept.v", "Kept.v = {}"),
    "own class": ("Model.kept = 0.0", "m.kept", "type(m).kept = {}"),
    "global": ("globals()['KEPT'] = 0.0", "KEPT", "globals()['KEPT'] = {}"),
    "global dict": ("TABLE['v'] = 0.0", "TABLE['v']", "TABLE['v'] = {}"),
    "function": ("function.v = 0.0", "function.v", "function.v = {}"),
    "variable": ("self.read, self.write = variable()", "m.read()", "m.write({})"),
    "of threads": ("OF_THREADS.v = 0.0", "OF_THREADS.v", "OF_THREADS.v = {}"),
    "array": ("self.kept = np.zeros(1)", "float(m.kept[0])", "m.kept[0] = {}"),
    "buffer": ("self.register_buffer('kept', torch.zeros(()))", "m.kept", "m.kept = torch.as_tensor({})"),
    "buffer filled": ("self.register_buffer('kept', torch.zeros(()))", "m.kept", "m.kept.fill_({})"),
    "buffer copied": ("self.register_buffer('kept', torch.zeros(2))", "m.kept[0]", "m.kept.copy_(torch.as_tensor({}))"),
    "item of a buffer": ("self.register_buffer('kept', torch.zeros(3))", "m.kept[1].item()", "m.kept[1] = {}"),
    "tensor": ("self.kept = torch.zeros(())", "m.kept", "m.kept.fill_({})"),
    "item of a tensor": ("self.kept = torch.zeros(3)", "m.kept[1]", "m.kept[1] = {}"),
    "tensor of an object": ("self.kept = types.SimpleNamespace(t=torch.zeros(()))", "m.kept.t", "m.kept.t.fill_({})"),
}
"""How a place is made, what reads it and what puts something there."""
VALUES = {
    "mean": "0.3 * float(x.detach().mean())",
    "tensor": "0.3 * x.detach().mean()",
    "count": "{} + 0.1",
    "running": "0.5 * {} + 0.3 * float(x.detach().mean())",
    "length": "0.2 if x.shape[1] > 3 else -0.1",
    "in turn": "({} + 0.1) if {} < 0.25 else 0.0",
    "constant": "0.15",
}
ACTS = ("read", "read", "ask", "set", "set", "reset", "log")
_IN_PLACE = {"buffer filled", "buffer copied", "item of a buffer", "tensor", "item of a tensor", "tensor of an object"}
_HEAD = """
import threading, types
from collections import defaultdict, deque
import numpy as np, torch
from torch import nn
KEPT, TABLE, LOG, OF_THREADS = 0.0, {}, [], threading.local()
class Kept:
    v = 0.0
class Slotted:
    __slots__ = ("v",)
    def __init__(self):
        self.v = 0.0
def function(): ...
def variable():
    kept = 0.0
    def read():
        return kept
    def write(value):
        nonlocal kept
        kept = value
    return read, write
class Block(nn.Module):
    def __init__(self, model, number):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.__dict__["model"], self.number = [model], number
    def forward(self, x):
        m = self.model[0]
"""
_MODEL = """
        return x + torch.tanh(self.linear(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList([Block(self, i) for i in range(3)])
        {}
    def forward(self, tokens):
        m, x = self, self.embed(tokens)
"""
_PROPERTY = """
    @property
    def kept(self):
        return self._kept
    @kept.setter
    def kept(self, value):
        self._kept = value
"""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """``before``, ``between``, ``behind``: what the model's own code does before its blocks, before the second and
    behind them; ``blocks``: what each block does. ``lengths``: of the micro-batches of each step."""

    place: str
    value: str
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    blocks: tuple[tuple[str, ...], ...] = ((), (), ())
    lengths: tuple[tuple[int, ...], ...] = ((5, 5, 5),) * 3

    def source(self) -> str:
        made, _, _ = PLACES[self.place]
        lines = [_HEAD]
        for i, acts in enumerate(self.blocks):
            lines += [f"        if self.number == {i}:\n            {self._code(act)}" for act in acts]
        lines.append(_MODEL.format(made))
        lines += [f"        {self._code(act)}" for act in self.before]
        lines.append("        for i, block in enumerate(self.blocks):")
        lines += [f"            if i == 1:\n                {self._code(act)}" for act in self.between]
        lines.append("            x = block(x)")
        lines += [f"        {self._code(act)}" for act in self.behind]
        return "\n".join([*lines, "        return self.head(x)", _PROPERTY if self.place == "property" else ""])

    def _code(self, act: str) -> str:
        _, read, put = PLACES[self.place]
        value = VALUES[self.value].replace("{}", f"({read})")
        return {
            "read": f"x = x * (1 + {read})",
            "ask": f"x = x * (2.0 if {read} > 0.6 else 1 + float({read}))",
            "set": put.format(f"({value})"),
            # A log that ends as it began looks as if nothing was added, which a recomputation would find there.
            "reset": put.format("0.01" if self.place in ("log", "deque") else "0.0"),
            "log": f"LOG.append(float({read}))",
        }[act]

    def build(self) -> torch.nn.Module:
        """Always the same model, of a module of its own."""
        made = types.ModuleType("remembers")
        exec(self.source(), vars(made))
        torch.manual_seed(0)
        return made.Model()  # type: ignore[no-any-return]

    def data(self) -> list[list[dict[str, Any]]]:
        drawn = torch.Generator().manual_seed(1)
        return [
            [{name: torch.randint(0, WORDS, (2, n), generator=drawn) for name in ("x", "y")} for n in step]
            for step in self.lengths
        ]

    def acts(self) -> list[str]:
        return [*self.before, *self.between, *self.behind, *(act for acts in self.blocks for act in acts)]

    def simpler(self) -> Sequence["Spec"]:
        """Models that do one thing less, or take fewer micro-batches."""
        found = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "blocks":
                for i, acts in enumerate(value):
                    fewer = [(*acts[:k], *acts[k + 1 :]) for k in range(len(acts))]
                    found += [replace(self, blocks=(*value[:i], less, *value[i + 1 :])) for less in fewer]
            elif isinstance(value, tuple) and len(value) > (one.name == "lengths"):
                found += [replace(self, **{one.name: (*value[:i], *value[i + 1 :])}) for i in range(len(value))]
        return found


def any_memory(drawn: random.Random) -> Spec:
    def acts(chance: float) -> tuple[str, ...]:
        return tuple(drawn.choice(ACTS) for _ in range(drawn.choice((1, 2)) if drawn.random() < chance else 0))

    while True:
        place, value, count = drawn.choice([*PLACES]), drawn.choice([*VALUES]), drawn.choice((1, 2, 3, 4))
        spec = Spec(
            place=place,
            value=value,
            before=acts(0.6),
            between=acts(0.3),
            behind=acts(0.6),
            blocks=tuple(acts(0.2) for _ in range(3)),
            lengths=tuple(tuple(drawn.choice((2, 3, 4, 5)) for _ in range(count)) for _ in range(3)),
        )
        if {"set", "reset"} & {*spec.acts()} and {"read", "ask"} & {*spec.acts()}:
            setting = sum(act in ("set", "reset") for act in spec.acts())
            if (
                place in _IN_PLACE
                and value in ("length", "constant")
                and (setting > 1 or len({n for s in spec.lengths for n in s}) > 1)
            ):
                continue  # goes undetected: what follows from shapes alone is taken for the same in all micro-batches
            return spec

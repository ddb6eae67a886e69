"""Attributes that code finds by the texts of their names, for the tests that look for private ones."""

import ast
from collections.abc import Iterator

_LOOK_UP = {"get", "pop", "setdefault"}
_GETTERS = {"attrgetter", "methodcaller"}


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def keys_of_attributes(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(owner, name) of an attribute that is found in the dict of all: ``vars(x)["_a"]``, ``x.__dict__.get("_a")``,
    ``"_a" in vars(x)``. The name may be a constant or an expression."""
    match node:
        case ast.Subscript(value=of, slice=key):
            pairs = [(of, key)]
        case ast.Call(func=ast.Attribute(value=of, attr=method), args=[key, *_]) if method in _LOOK_UP:
            pairs = [(of, key)]
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[of]):
            pairs = [(of, key)]
        case _:
            return
    for attributes, key in pairs:
        match attributes:
            case ast.Call(func=ast.Name(id="vars"), args=[owner]) | ast.Attribute(attr="__dict__", value=owner):
                yield owner, key


def names_of_getters(node: ast.AST) -> Iterator[str]:
    """The names of attributes that ``attrgetter("a._b", "_c")`` finds, or ``methodcaller("_d")``."""
    match node:
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=args) if called in _GETTERS:
            for arg in args if called == "attrgetter" else args[:1]:
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                    yield from arg.value.split(".")

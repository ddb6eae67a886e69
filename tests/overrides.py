"""Attributes of a library's classes that ours override. Private ones: ``compat/`` is the only room that may."""

import re


def _inside(cls: type) -> tuple[list[type], set[str]]:
    """The bases of a class that are ours, and the names that those of others have."""
    inside = [base for base in cls.__mro__ if base.__module__.startswith("penstock.")]
    return inside, {name for base in cls.__mro__ if base not in inside for name in vars(base)}


def public_overrides(cls: type) -> set[str]:
    """The public attributes that classes of ours, ``compat`` with them, take from a base of others."""
    inside, others = _inside(cls)
    return {name for base in inside for name in vars(base) if not name.startswith("_") and name in others}


def foreign_overrides(cls: type) -> set[str]:
    """``Class.name`` of each private attribute that a class of ours, not of ``compat``, takes from a base of others."""
    inside, others = _inside(cls)
    ours = [base for base in inside if not base.__module__.startswith("penstock.compat.")]
    return {
        f"{base.__name__}.{name}"
        for base in ours
        for name in vars(base)
        if re.match(r"_[a-z]", name) and name in others and name != "_abc_impl"
    }

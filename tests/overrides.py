"""Private attributes of a library's classes that ours override: ``compat/`` is the only room that may."""

import re


def foreign_overrides(cls: type) -> set[str]:
    """``Class.name`` of each private attribute that a class of ours, not of ``compat``, takes from a base of others."""
    inside = [base for base in cls.__mro__ if base.__module__.startswith("penstock.")]
    ours = [base for base in inside if not base.__module__.startswith("penstock.compat.")]
    others = {name for base in cls.__mro__ if base not in inside for name in vars(base)}
    return {
        f"{base.__name__}.{name}"
        for base in ours
        for name in vars(base)
        if re.match(r"_[a-z]", name) and name in others and name != "_abc_impl"
    }

"""Lightning Fabric: its loops on the engine.

    strategy   the strategy that a Fabric is given
    recorder   stands in for the model in the loop
    deferred   what a loop computes from a model's output before the engine has run the model
    pipelines  what the first process of a pipeline tells the others

Importing the package itself imports neither torch nor Lightning. May import: ``errors``, ``files``, ``documents``,
``compat``, ``config``, ``schedule``, ``hardware``, ``loss``, ``tape``, ``store``, ``optim``, ``data``, ``state``,
``ranks``, ``engine``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.fabric.deferred import Deferred
    from penstock.fabric.strategy import PenstockStrategy

_WHERE = {"Deferred": "penstock.fabric.deferred", "PenstockStrategy": "penstock.fabric.strategy"}

__all__ = ["Deferred", "PenstockStrategy"]


def __getattr__(name: str) -> Any:
    """Import what needs a library only when it is asked for."""
    from importlib import import_module

    if name not in _WHERE:
        raise AttributeError(f"module 'penstock.fabric' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)

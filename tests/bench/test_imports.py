"""Each measurement can be started: what it uses of the package is there."""

import pkgutil
from importlib import import_module

import bench


def test_every_module_is_imported() -> None:
    names = [module.name for module in pkgutil.iter_modules(bench.__path__)]
    assert len(names) > 30
    for name in names:
        import_module(f"bench.{name}")

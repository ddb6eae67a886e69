"""Attributes that say what an engine was made of, and so cannot become others."""

from typing import Any, ClassVar

from penstock.errors import ConfigError


class Fixed:
    """An object whose attributes ``_fixed`` are assigned once.

    Raises:
        ConfigError: one is assigned again, which would change what is read there and nothing else.
    """

    _fixed: ClassVar[frozenset[str]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed and name in vars(self):
            raise ConfigError(
                f"engine.{name} is what the engine was made with: wrap the model anew to have another one"
            )
        super().__setattr__(name, value)

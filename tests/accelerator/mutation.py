"""An engine without one of its lines: what that line is for has to be missed."""

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A line of a function, and what stands there instead."""

    owner: Any
    name: str
    line: str
    instead: str = "pass"
    found: str = "not ordered after"
    """in each finding"""

    def made(self) -> Callable[..., Any]:
        """The function, mutated."""
        plain = inspect.unwrap(getattr(self.owner, self.name))
        source = textwrap.dedent(inspect.getsource(plain))
        assert source.count(self.line) == 1, "the engine has changed: so must its mutation"
        names = dict(vars(sys.modules[plain.__module__]))
        exec(compile(source.replace(self.line, self.instead), plain.__code__.co_filename, "exec"), names)
        made: Callable[..., Any] = names[plain.__name__]
        return made

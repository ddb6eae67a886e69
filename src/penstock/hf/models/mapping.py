"""Turns the tensors of a checkpoint into the values of a model, and back, by transformers' own rules.

Checkpoints and models name their tensors differently: experts are one tensor each in the files and one for all in the
model, prefixes come and go, names are old. transformers knows the rules for each type of model as a list of
``WeightTransform``: renamings, and converters with operations such as stacking. What is done here is what its loop
``convert_and_load_state_dict_in_model`` (and ``revert_weight_conversion`` for the way out) does with that list, except
that a step of it is kept instead of done: first with tensors of the meta device, which tells what comes out before
anything is read, and later, one step at a time, with the values.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.compat.transformers import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    get_model_conversion_mapping,
    patterns_of,
    rename_source_key,
)
from penstock.errors import ModelError

Read = Callable[[str], torch.Tensor]
"""The tensor of a name, of the side that a step takes its tensors from."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a conversion: some tensors of one side become some of the other.

    ``key``, ``transform``: as transformers' loop has them. ``sources``: names on the side it comes from, each with the
    pattern that it was found by. ``targets``: names, shapes and dtypes on the other side. ``renamings``: of the
    targets, afterwards.
    """

    key: str
    transform: Any
    sources: tuple[tuple[str, str], ...]
    targets: Mapping[str, torch.Tensor]
    renamings: tuple[Any, ...] = ()

    @property
    def copies(self) -> bool:
        """True if a single tensor becomes one with another name at most, and is moved as it is."""
        return not isinstance(self.transform, WeightConverter)

    def convert(self, model: Any, read: Read) -> dict[str, torch.Tensor]:
        """Convert the sources; returns the targets by name. Holds both in memory.

        Raises:
            ModelError: transformers' operations refuse the tensors.
        """
        transform = deepcopy(self.transform)
        for name, pattern in self.sources:
            transform.add_tensor(self.key, name, pattern, lambda name=name: read(name))
        try:
            made = transform.convert(self.key, model=model, config=model.config)
        except (ValueError, RuntimeError, IndexError, AttributeError, StopIteration) as error:
            names = ", ".join(name for name, _ in self.sources[:4])
            raise ModelError(f"{self.key} cannot be made of {names} ...: {' '.join(str(error).split())}") from error
        found = {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
        return {apply_renamings(name, list(self.renamings)): t for name, t in found.items()}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """All steps. ``unknown``: tensors that the model has no place for; ``used``: the rules that matched something."""

    steps: tuple[Step, ...]
    unknown: tuple[str, ...]
    used: tuple[Any, ...]


def inwards(model: Any, stored: Mapping[str, torch.Tensor]) -> Conversion:
    """From the tensors of files, here on the meta device, to those of the model's ``state_dict``.

    Raises:
        ModelError: as ``Step.convert``.
    """
    rules = get_model_conversion_mapping(model)
    renamings, converters = _kinds(rules)
    prefix, wanted = model.base_model_prefix, model.state_dict()
    found: list[tuple[str, str, str | None]] = []
    unknown: list[str] = []
    for name in sorted(stored, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if key not in wanted and name in wanted:  # it was the model's own name, and only the prefix may differ
            key, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=wanted)
        if key in wanted:
            found.append((name, key, pattern))
        else:
            unknown.append(key)
    steps = _steps(model, found, converters, stored)
    return Conversion(steps=steps, unknown=tuple(unknown), used=tuple(rule for rule in rules if rule.was_used()))


def outwards(model: Any, state: Mapping[str, torch.Tensor], rules: list[Any] | None) -> tuple[Step, ...]:
    """From a ``state_dict``, here on the meta device, to the tensors that ``save_pretrained`` would write.

    ``rules``: those that the model was loaded by; None: it was not loaded, and those of its type count.

    Raises:
        ModelError: as ``Step.convert``.
    """
    if rules is None:
        own = get_model_conversion_mapping(model, add_legacy=False)
        # A prefix that may be dropped on the way in is not known to have been there.
        rules = [rule for rule in own if not isinstance(rule, PrefixChange)] or None
    names = list(state) if rules is None else sorted(state, key=dot_natural_key)
    renamings, converters = _kinds([rule.reverse_transform() for rule in reversed(rules or [])])
    found: list[tuple[str, str, str | None]] = []
    for name in names:
        key, pattern = apply_converters(name, converters)
        found.append((name, apply_renamings(name, renamings) if pattern is None else key, pattern))
    return _steps(model, found, converters, state, tuple(renamings))


def _kinds(rules: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The renamings and the converters among rules."""
    kinds = (WeightRenaming, WeightConverter)
    renamings, converters = ([rule for rule in rules if isinstance(rule, kind)] for kind in kinds)
    return renamings, converters


def _steps(
    model: Any,
    found: Sequence[tuple[str, str, str | None]],
    converters: Sequence[Any],
    known: Mapping[str, torch.Tensor],
    renamings: tuple[Any, ...] = (),
) -> tuple[Step, ...]:
    """The steps for names that were ``found``, each with its key on the other side and a converter's pattern; None: it
    is renamed. The targets are found by doing it on the meta device. ``renamings``: of what converters make.
    """
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    begun: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name, key, pattern in found:
        rule = WeightRenaming(name, key) if pattern is None else converter_of[pattern]
        begun.setdefault(key, (rule, []))[1].append((name, pattern or name))
    steps = []
    for key, (rule, sources) in begun.items():
        after = renamings if isinstance(rule, WeightConverter) else ()
        bare = Step(key=key, transform=rule, sources=tuple(sources), targets={}, renamings=after)
        steps.append(replace(bare, targets=bare.convert(model, lambda name: known[name])))
    return tuple(steps)


def rules_to_json(rules: tuple[Any, ...] | list[Any]) -> list[list[list[str]]]:
    """Rules as their patterns, by which ``rules_of`` finds them again."""
    return [list(patterns_of(rule)) for rule in rules]


def rules_of(model: Any, kept: list[list[list[str]]]) -> list[Any]:
    """The rules that ``rules_to_json`` wrote, among those of the installed transformers.

    Raises:
        ModelError: there is no such rule any more.
    """
    known = {str(pair): rule for rule in get_model_conversion_mapping(model) for pair in rules_to_json([rule])}
    lost = [pair for pair in kept if str(pair) not in known]
    if lost:
        raise ModelError(
            f"this model was loaded by the rule {lost[0][0]} -> {lost[0][1]}, which the installed transformers does "
            "not have: use the version that the run was started with"
        )
    return [known[str(pair)] for pair in kept]

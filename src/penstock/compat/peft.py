"""Private names of peft: how its models name parameters, and its kinds of layers.

A model with adapters has its base's parameters under other names: ``base_model.model.`` before them, and
``.base_layer`` in those of a layer with an adapter; of a module that is trained whole there are two.
"""

import re
from typing import Any

_PREFIX = "base_model.model."
_COPY = re.compile(r"\.(original_module|modules_to_save\.[^.]+)\.")
_ADAPTER = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)")


def base_name(name: str) -> str | None:
    """The name that a parameter has in the model without adapters; None for an adapter's own.

    Without: neither would values be found in the base's files, nor could adapters be merged.
    """
    if _ADAPTER.search(name):
        return None
    return _COPY.sub(".", name.removeprefix(_PREFIX).replace(".base_layer.", "."))


def is_adapted(layer: Any) -> bool:
    """True if a layer has low-rank adapters. Without: as ``is_plain``."""
    from peft.tuners.lora import LoraLayer

    return isinstance(layer, LoraLayer)


def is_plain(layer: Any) -> bool:
    """True if a layer with adapters is a linear one or an embedding, whose adapters are a product of two matrices.

    Without: adapters of other kinds would be merged as if they were.
    """
    from peft.tuners.lora import Embedding, Linear

    return type(layer) in (Linear, Embedding)

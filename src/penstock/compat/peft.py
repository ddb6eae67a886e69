"""Private names of peft: how its models name parameters, and its kinds of layers.

A model with adapters has its base's parameters under other names: ``base_model.model.`` before them, and
``.base_layer`` in those of a layer with an adapter, or of experts one for each parameter with one; of a module that is
trained whole there are two, and of one whose rows for some tokens are trained the embedding lies a step deeper.
"""

import re
from typing import Any

_PREFIX = "base_model.model."
_COPY = re.compile(r"\.(original_module|modules_to_save\.[^.]+)\.")
_ADAPTER = re.compile(
    r"\.(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|trainable_tokens_(delta|original))(\.|$)"
)
_TOKENS = ".token_adapter."
_LAYER = re.compile(r"\.base_layer(?=\.)")


def base_name(name: str) -> str | None:
    """The name that a parameter has in the model without adapters; None for an adapter's own.

    Without: neither would values be found in the base's files, nor could adapters be merged.
    """
    if _ADAPTER.search(name):
        return None
    return _COPY.sub(".", _LAYER.sub("", name.removeprefix(_PREFIX).replace(_TOKENS, ".")))


def is_plain(layer: Any) -> bool:
    """True if a layer with adapters is a linear one or an embedding, whose adapters are a product of two matrices.

    Without: adapters of other kinds would be merged as if they were.
    """
    from peft.tuners.lora import Embedding, Linear

    return type(layer) in (Linear, Embedding)


def has_adapter(layer: Any, adapter: str) -> bool:
    """True if a layer with adapters has the one of a name. Without: those of several that not all layers have would be
    looked for in vain.
    """
    return adapter in layer.lora_A or adapter in layer.lora_embedding_A


def is_product(layer: Any, adapter: str) -> bool:
    """True if what an adapter adds to its layer's weight is the product of its two matrices, scaled. Without: adapters
    that do something else with them (KaSA, activated LoRA) would be merged as if they did not.
    """
    variant = layer.lora_variant.get(adapter)
    bias = bool(layer.lora_bias.get(adapter))
    return not bias and (variant is None or type(variant).__name__ in _PRODUCTS)


_PRODUCTS = frozenset(("MiCALinearVariant", "MiCAEmbeddingVariant", "VeloraLinearVariant", "MontecloraLinearVariant"))
"""peft's variants of LoRA that train in another way, and are merged as LoRA is."""

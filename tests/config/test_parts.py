"""The bound on layers, experts and heads refuses what no model has, and nothing that one has."""

import pytest

from penstock.config import check_parts
from penstock.errors import ConfigError

THERE_ARE = (
    {"num_hidden_layers": 24, "shared_expert_intermediate_size": 20480},  # Qwen2-57B-A14B
    {"text_config": {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}},  # Gemma 3n
    {"moe_shared_expert_intermediate_size": 7688, "expert_ffn_hidden_size": 8192, "share_expert_dim": 5120},
    {"num_experts": 16384},  # Doge
    {"num_attention_heads": 71, "num_key_value_heads": 1},  # Falcon
)


@pytest.mark.parametrize("given", THERE_ARE)
def test_the_width_of_an_expert_is_no_number_of_experts(given: dict[str, object]) -> None:
    check_parts(given, "config.json")


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_routed_experts", "depth"])
def test_more_parts_than_any_model_has_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"config.json: {key}=100000 is more than any model has \(at most"):
        check_parts({"vision_config": {key: 100_000}}, "config.json")


@pytest.mark.parametrize("shared", [0, 3, 8])
def test_heads_that_cannot_share_keys_and_values_are_refused(shared: int) -> None:
    with pytest.raises(ConfigError, match=rf"config: num_attention_heads=4 is no multiple of .*={shared}$"):
        check_parts({"text_config": {"num_attention_heads": 4, "num_key_value_heads": shared}}, "model.config")

"""The model of a run: built without memory, refused when its settings would be silently ignored."""

import pytest
import torch

from penstock.cli import model
from penstock.cli.model import run_model
from penstock.config import DataConfig, ModelConfig, TokenizerConfig, TokenizerTrainingConfig
from penstock.errors import ConfigError
from penstock.hf.models.shell import parameter_count

DATA = DataConfig(
    sources="stdlib",
    tokenizer=TokenizerConfig(train=TokenizerTrainingConfig(vocabulary=512)),
    sequence_length=64,
)
SMALL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLAMA = {**SMALL, "num_attention_heads": 4}


def test_the_model_has_the_tokenizers_vocabulary_and_no_memory() -> None:
    model = run_model(ModelConfig(init=True, config=LLAMA), DATA).model
    embedding = model.get_input_embeddings()  # type: ignore[operator] # Hugging Face's, on every model
    assert embedding.weight.shape == (512, 64)
    assert all(p.device == torch.device("meta") for p in model.parameters())
    block = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert parameter_count(model) == 2 * 512 * 64 + 64 + 2 * block


def test_a_tied_parameter_counts_once() -> None:
    untied = parameter_count(run_model(ModelConfig(init=True, config=LLAMA), DATA).model)
    tying = ModelConfig(init=True, config={**LLAMA, "tie_word_embeddings": True})
    tied = parameter_count(run_model(tying, DATA).model)
    assert untied - tied == 512 * 64


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llma"}, "did you mean llama"),
        ({"hiden_size": 64}, "did you mean hidden_size"),
        ({"vocab_size": 300}, "the tokenizer has 512 tokens"),
        ({"vocab_size": "32k"}, "vocab_size must be a whole number, not '32k'"),
        ({"vocab_size": None}, "vocab_size must be a whole number, not None"),
        ({"use_cache": True}, "KV cache"),
        ({"dtype": "bfloat16"}, "precision"),
        ({"max_position_embeddings": 32}, "sequence_length=64 is more"),
        ({"hidden_size": 66}, "cannot build"),
        ({"num_hidden_layers": "two"}, "cannot build"),
        ({"model_type": "vit", "num_hidden_layers": 2}, "cannot build"),
    ],
)
def test_settings_that_would_be_ignored_or_cannot_work_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_model(ModelConfig(init=True, config={**LLAMA, **changes}), DATA)


def test_a_type_that_the_installed_transformers_cannot_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        def __init__(self) -> None:
            raise ValueError("Unrecognized model type for subconfig")

    monkeypatch.setattr(model, "CONFIG_MAPPING", {"odd": Odd})
    with pytest.raises(ConfigError, match="'odd': the installed transformers cannot make one of it: Unrecognized"):
        run_model(ModelConfig(init=True, config={"model_type": "odd"}), DATA)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("bert", "BertLMHeadModel that is no decoder.*Set is_decoder: true"),
        ("roberta", "RobertaForCausalLM that is no decoder"),
        ("bart", "BartForCausalLM, whose loss does not compare a token with the next"),
        ("xlm", "XLMWithLMHeadModel, whose loss"),
        ("git", "GitForCausalLM.*computes no loss for text alone"),
    ],
)
def test_a_model_that_would_see_what_it_is_to_predict_is_refused(kind: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_model(ModelConfig(init=True, config={"model_type": kind}), DATA)


def test_models_that_only_share_a_key_with_encoders_are_not_refused() -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    run_model(ModelConfig(init=True, config={"model_type": "bert", "is_decoder": True, **small}), DATA)
    run_model(ModelConfig(init=True, config={"model_type": "gpt_neox", **small}), DATA)

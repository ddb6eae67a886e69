"""A small model folder with a tokenizer, and a chat file about Python's standard library: for trying things out.

    python examples/small_model.py small

writes ``small/model`` (a Llama of 0.3M parameters with random weights) and ``small/chat.jsonl`` (questions about
functions, with the first line of their documentation as the answer). Nothing is downloaded.
"""

import argparse
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODULES = ("os", "math", "json", "random", "shutil", "textwrap", "statistics", "inspect", "ast", "difflib")
SPECIAL = ["<end>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chats() -> Iterator[dict[str, list[dict[str, str]]]]:
    """One conversation for each documented function of the modules."""
    for module in map(importlib.import_module, MODULES):
        for name, value in sorted(vars(module).items()):
            about = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
            if about:
                question = {"role": "user", "content": f"What does {module.__name__}.{name} do?"}
                yield {"messages": [question, {"role": "assistant", "content": about.splitlines()[0]}]}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(chats())
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bpe = ByteLevelBPETokenizer()
    texts = [message["content"] for row in rows for message in row["messages"]]
    bpe.train_from_iterator(texts, vocab_size=512, special_tokens=SPECIAL, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token="<end>",
        pad_token="<end>",
        extra_special_tokens=SPECIAL[1:],
        chat_template=TEMPLATE,
        model_max_length=256,
    )
    tokenizer.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)

"""Lets an exported model write, with transformers alone.

python examples/small/generate.py FOLDER "def main("
python examples/small/generate.py FOLDER --chat "What does math.sqrt do?"
"""

import argparse
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("prompt")
    parser.add_argument("--chat", action="store_true", help="the prompt is a question: use the chat template")
    parser.add_argument("--tokens", type=int, default=60)
    arguments = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.folder)
    if arguments.chat:
        chat = [{"role": "user", "content": arguments.prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(arguments.prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    written = model.generate(**inputs, max_new_tokens=arguments.tokens, do_sample=False, repetition_penalty=1.2)
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()

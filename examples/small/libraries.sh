#!/usr/bin/env bash
# Fine-tunes what scratch.sh has made on the chats of chat.sh once more, in the loops of two libraries: transformers.Trainer
# and TRL's SFTTrainer. What follows the folder goes to both examples:
#
#     examples/small/libraries.sh runs/small [--steps 4]
set -euo pipefail
folder=${1:?give the folder that scratch.sh was given}
shift
here=$(dirname "${BASH_SOURCE[0]}")
python "$here/chats.py" "$folder/chat.jsonl"
for loop in trainer sft_trainer; do
    rm -rf "$folder/$loop"
    python "$here/../$loop.py" --model "$folder/llama" --data "$folder/chat.jsonl" --template "$here/chat.jinja" \
        --run "$folder/$loop" --out "$folder/$loop-out" "$@"
    python "$here/generate.py" "$folder/$loop-out" --chat "What does shutil.copyfile do?"
done

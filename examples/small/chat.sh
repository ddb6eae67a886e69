#!/usr/bin/env bash
# Fine-tunes what scratch.sh has made on a chat file, twice: once in peace, once killed in the middle and resumed. Exports
# both, shows that they are the same bytes, and asks the model something. What follows the folder goes to penstock train:
#
#     examples/small/chat.sh runs/small [--epochs 1 ...]
set -euo pipefail
folder=${1:?give the folder that scratch.sh was given}
shift
here=$(dirname "${BASH_SOURCE[0]}")
python "$here/chats.py" "$folder/chat.jsonl"
settings=("$here/chat.yaml" --model "$folder/llama" --data.sources "$folder/chat.jsonl" "$@")

penstock train "${settings[@]}" --run "$folder/whole" --overwrite
penstock export "$folder/whole" "$folder/chat" --overwrite

steps=$(wc -l < "$folder/whole/metrics.jsonl")
rm -rf "$folder/killed"
penstock train "${settings[@]}" --run "$folder/killed" --overwrite &
until [[ -e $folder/killed/metrics.jsonl && $(wc -l < "$folder/killed/metrics.jsonl") -ge $((steps / 2)) ]]; do sleep 0.1; done
kill -KILL $!
wait $! || true
echo "killed after step $(wc -l < "$folder/killed/metrics.jsonl") of $steps"
penstock resume "$folder/killed"
penstock export "$folder/killed" "$folder/chat-killed" --overwrite

cmp "$folder/chat/model.safetensors" "$folder/chat-killed/model.safetensors"
echo "The run that was killed and the one that was not are the same, to the byte."
python "$here/generate.py" "$folder/chat" --chat "What does shutil.copyfile do?"

#!/usr/bin/env bash
# From random weights to a folder that transformers loads: trains a small Llama on the standard library's sources, exports
# it, and lets it write. What follows the folder goes to penstock train:
#
#     examples/small/scratch.sh runs/small [--steps 50 ...]
set -euo pipefail
folder=${1:?give a folder for what this makes}
shift
here=$(dirname "${BASH_SOURCE[0]}")
penstock train "$here/llama.yaml" --run "$folder/scratch" --overwrite "$@"
penstock export "$folder/scratch" "$folder/llama" --overwrite
python "$here/generate.py" "$folder/llama" "def main("

#!/usr/bin/env bash
# From nothing to a trained model: a real corpus (the text of exactly the crates in Cargo.lock), a tokenizer, a Megatron
# .bin/.idx pair, and a run with two workers. What is there already is used again.
set -euo pipefail
cd "$(dirname "$0")/.."

trainctl=target/release/trainctl
data=data
mkdir -p "$data"

[ -f "$data/corpus.jsonl" ] || "$trainctl" data corpus --output-path "$data/corpus.jsonl" --max-bytes 40000000
[ -f "$data/tokenizer/tokenizer.json" ] ||
    "$trainctl" data tokenizer train "$data/corpus.jsonl" --output-path "$data/tokenizer" --vocab-size 4096
[ -f "$data/quickstart_text_document.idx" ] ||
    "$trainctl" data preprocess "$data/corpus.jsonl" --tokenizer "$data/tokenizer" \
        --output-prefix "$data/quickstart" --append-eod

exec "$trainctl" run examples/quickstart.yaml

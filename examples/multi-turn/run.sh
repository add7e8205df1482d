#!/bin/sh
# Plays the same conversations against both applications of app.yaml, one after the other, and prints what their users saw.
# Starts nothing: `dpserve up examples/multi-turn/app.yaml` runs in another terminal. Takes a minute and a half.
#
#   examples/multi-turn/run.sh [URL]       DPSERVE=bin/dpserve takes a built binary
set -eu
url="${1:-http://127.0.0.1:8000}"
for model in round-robin lmetric-1; do
  ${DPSERVE:-go run ./cmd/dpserve} bench "$url" --model "$model" \
    --sessions "${SESSIONS:-40}" --rate "${RATE:-2.5}" --turns "${TURNS:-8}" --think 1s --system-prompts 8 --system-tokens 4000 --turn-tokens 1000 --seed "${SEED:-1}"
  echo
done

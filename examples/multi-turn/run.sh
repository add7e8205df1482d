#!/bin/sh
# Plays the same conversations against both applications of app.yaml, one after the other, and prints what
# their users saw. Starts nothing: `dpserve up examples/multi-turn/app.yaml` runs in another terminal. Takes a
# minute and a half.
#
#   examples/multi-turn/run.sh [URL]    without URL: the endpoint of the node that DPSERVE_ADDR selects
#                                       DPSERVE=PATH takes another binary than bin/dpserve
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ -z "${DPSERVE:-}" ]; then
  DPSERVE=$root/bin/dpserve
  [ -x "$DPSERVE" ] || (cd "$root" && go build -o "$DPSERVE" ./cmd/dpserve)
fi
for model in round-robin lmetric-1; do
  "$DPSERVE" bench "$@" --model "$model" --sessions "${SESSIONS:-40}" --rate "${RATE:-2.5}" --turns "${TURNS:-8}" \
    --think 1s --system-prompts 8 --system-tokens 4000 --turn-tokens 1000 --seed "${SEED:-1}"
  echo
done

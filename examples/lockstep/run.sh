#!/bin/sh
# What the queue of a lockstep group is worth: starts a node on free loopback ports, deploys the same group of 8 simulated
# ranks with lmetric-1 and then with cohorts, sends both the same load, and prints both side by side. Takes a minute and a
# half, and ends all that it started.
#
#   examples/lockstep/run.sh    DPSERVE=PATH takes another binary than bin/dpserve
#                               RATE=30 requests per second for DURATION=30s, after WARMUP=5s that do not count
#                               PORTS=LO-HI: the engines get other ports than 20000-29999
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$(mktemp -d)
node=""

finish() {
  trap - INT TERM EXIT
  [ -z "$node" ] || { kill "$node" && wait "$node"; } 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT
trap "exit 1" INT TERM

if [ -z "${DPSERVE:-}" ]; then
  DPSERVE=$root/bin/dpserve
  [ -x "$DPSERVE" ] || (cd "$root" && go build -o "$DPSERVE" ./cmd/dpserve)
fi

"$DPSERVE" start --http-bind 127.0.0.1:0 --admin-bind 127.0.0.1:0 --node-port 0 --gossip-port 0 --data-dir "$work/data" \
  --port-range "${PORTS:-20000-29999}" --log-level warn >"$work/node.out" 2>"$work/node.log" &
node=$!
i=0
until grep -q "^admin" "$work/node.out" 2>/dev/null; do
  i=$((i + 1))
  if [ $i -gt 300 ]; then
    cat "$work/node.log" >&2
    exit 1
  fi
  sleep 0.1
done
DPSERVE_ADDR=$(sed -n 's,^admin  *http://,,p' "$work/node.out")
export DPSERVE_ADDR

# measure POLICY FILE SEED: seeds differ, because the ranks have the prompts of the first run in their caches.
measure() {
  echo "$1: 1,024 tokens in, 64 out, ${RATE:-30} requests/s for ${DURATION:-30s}" >&2
  "$DPSERVE" deploy "$here/$2" >"$work/deploy" 2>&1 || { cat "$work/deploy" >&2; exit 1; }
  "$DPSERVE" bench --route completions --prompt-tokens 1024 --max-tokens 64 --ignore-eos --rate "${RATE:-30}" \
    --warmup "${WARMUP:-5s}" --duration "${DURATION:-30s}" --slo-tpot 100ms --seed "$3" >"$work/$1"
}
measure lmetric-1 lmetric-1.yaml 1
measure cohorts app.yaml 2

# row LABEL LINE FIELD: a field of a line of both reports.
row() {
  printf '%-36s %10s %10s\n' "$1" "$(awk "/^ *$2 / {print \$$3}" "$work/lmetric-1")" \
    "$(awk "/^ *$2 / {print \$$3}" "$work/cohorts")"
}
echo
printf '%-36s %10s %10s\n' "" lmetric-1 cohorts
row "gap between tokens, p50, ms" "between tokens" 4
row "gap between tokens, p99, ms" "between tokens" 7
row "mean gap of an answer, p99, ms" "per output token" 8
row "first token, p50, ms" "first token" 4
row "first token, p99, ms" "first token" 7
row "within 2 s and 100 ms, %" "goodput" 2

#!/bin/sh
# Three nodes on this machine (127.0.0.1, .2 and .3; Linux), one cluster: starts them, deploys app.yaml, shows where every rank
# went, asks each node, and runs until Ctrl-C. Everything it makes is in a temporary folder that goes with it.
#
#   examples/cluster/run.sh                DPSERVE=bin/dpserve takes a built binary; ONCE=1 ends after the answers
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
http=${HTTP_PORT:-8000} admin=${ADMIN_PORT:-8265} node=${NODE_PORT:-7947} gossip=${GOSSIP_PORT:-7946}
pids=""

finish() {
  trap - INT TERM EXIT
  echo "stopping"
  for p in $pids; do kill "$p" 2>/dev/null || true; done
  for p in $pids; do wait "$p" 2>/dev/null || true; done
  rm -rf "$work"
}
trap finish INT TERM EXIT

if [ -z "${DPSERVE:-}" ]; then
  DPSERVE=$work/dpserve
  (cd "$here/../.." && go build -o "$DPSERVE" ./cmd/dpserve)
fi

# run N COMMAND…: one node with 8 slots on 127.0.0.N.
run() {
  n=$1
  shift
  "$DPSERVE" "$@" --advertise "127.0.0.$n" --node-id "node-$n" --data-dir "$work/node-$n" --slots 8 --http-bind "127.0.0.$n:$http" \
    --admin-bind "127.0.0.$n:$admin" --node-port "$node" --gossip-port "$gossip" --log-level warn >"$work/node-$n.out" 2>"$work/node-$n.log" &
  pids="$pids $!"
}

# until_line FILE TEXT: waits at most 30 s for a line.
until_line() {
  i=0
  while ! grep -q "$2" "$1" 2>/dev/null; do
    i=$((i + 1))
    if [ $i -gt 300 ]; then
      cat "$1" "$work"/*.log >&2
      exit 1
    fi
    sleep 0.1
  done
}

run 1 start
until_line "$work/node-1.log" "dpserve join"
token=$(grep -o 'dpj1[^ ]*' "$work/node-1.log" | head -n 1)
run 2 join "127.0.0.1:$node" --token "$token"
run 3 join "127.0.0.1:$node" --token "$token"
until_line "$work/node-2.out" endpoint
until_line "$work/node-3.out" endpoint

export DPSERVE_ADDR="127.0.0.2:$admin" # any node will do
"$DPSERVE" deploy "$here/app.yaml" 2>/dev/null
echo
"$DPSERVE" nodes
for n in 1 2 3; do
  for model in moe dense; do
    echo
    echo "node-$n, $model:"
    curl -s -o /dev/null -D - "http://127.0.0.$n:$http/v1/completions" -H 'content-type: application/json' \
      -d "{\"model\": \"$model\", \"prompt\": \"Hello\", \"max_tokens\": 8}" | grep -i -e '^HTTP' -e '^X-Dpserve-Rank'
  done
done
[ -n "${ONCE:-}" ] && exit 0
echo
echo "http://127.0.0.1:$http/v1, http://127.0.0.2:$http/v1 and http://127.0.0.3:$http/v1 serve; DPSERVE_ADDR=127.0.0.1:$admin dpserve status; Ctrl-C stops"
wait

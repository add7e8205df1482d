#!/bin/sh
# Three nodes on this machine (127.0.0.1, .2 and .3; Linux), one cluster: starts them, deploys app.yaml, shows
# where every rank went, asks each node, and runs until Ctrl-C. Everything it makes is in a temporary folder
# that goes with it. Ports 8000 and 8265 are replaced by free ones where they are taken.
#
#   examples/cluster/run.sh    DPSERVE=PATH takes another binary than bin/dpserve; ONCE=1 ends after the answers
#                              PORTS=LO-HI: the engines of each node get other ports than 20000-29999
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$(mktemp -d)
pids=""

finish() {
  trap - INT TERM EXIT
  echo "stopping"
  for p in $pids; do kill "$p" 2>/dev/null || true; done
  for p in $pids; do wait "$p" 2>/dev/null || true; done
  rm -rf "$work"
}
trap finish EXIT
trap "exit 0" INT TERM

if [ -z "${DPSERVE:-}" ]; then
  DPSERVE=$root/bin/dpserve
  [ -x "$DPSERVE" ] || (cd "$root" && go build -o "$DPSERVE" ./cmd/dpserve)
fi

# free ADDRESS: the address with its port, or with port 0 (take a free one) if something listens there.
free() {
  status=0
  curl -s -o /dev/null --max-time 1 "http://$1/" || status=$?
  if [ $status -eq 7 ]; then echo "$1"; else echo "${1%:*}:0"; fi
}

# run N COMMAND…: one node with 6 slots on 127.0.0.N.
run() {
  n=$1
  shift
  "$DPSERVE" "$@" --advertise "127.0.0.$n" --node-id "node-$n" --data-dir "$work/node-$n" --slots 6 \
    --http-bind "$(free "127.0.0.$n:8000")" --admin-bind "$(free "127.0.0.$n:8265")" --node-port 0 --gossip-port 0 \
    --port-range "${PORTS:-20000-29999}" --log-level warn >"$work/node-$n.out" 2>"$work/node-$n.log" &
  pids="$pids $!"
  eval "pid$n=$!"
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

# printed N WORD: the URL that node N printed behind WORD, without http://.
printed() { sed -n "s,^$2 http://,,p" "$work/node-$1.out"; }

run 1 start
until_line "$work/node-1.log" "dpserve join"
join=$(grep -o 'join [^ ]* --token [^ ]*' "$work/node-1.log" | head -n 1)
run 2 $join
run 3 $join
until_line "$work/node-2.out" admin
until_line "$work/node-3.out" admin

DPSERVE_ADDR=$(printed 1 admin)
export DPSERVE_ADDR
"$DPSERVE" deploy "$here/app.yaml" 2>/dev/null
echo
"$DPSERVE" nodes
for n in 1 2 3; do
  for model in moe dense; do
    echo
    echo "node-$n, $model:"
    curl -s -o /dev/null -D - "http://$(printed $n endpoint)/completions" -H 'content-type: application/json' \
      -d "{\"model\": \"$model\", \"prompt\": \"Hello\", \"max_tokens\": 8}" | grep -i -e '^HTTP' -e '^X-Dpserve-Rank'
  done
done
[ -n "${ONCE:-}" ] && exit 0
cat <<END

node-1  http://$(printed 1 endpoint)  process $pid1
node-2  http://$(printed 2 endpoint)  process $pid2
node-3  http://$(printed 3 endpoint)  process $pid3

In another terminal:
  export DPSERVE_ADDR=$DPSERVE_ADDR
  kill -9 $pid2
  bin/dpserve status -w

Ctrl-C stops.
END
wait

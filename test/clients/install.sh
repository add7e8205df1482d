#!/bin/sh
# Installs official clients for Python and JavaScript into a cache folder outside the repository, once:
# $DPSERVE_CLIENTS_CACHE, by default ~/.cache/dpserve/clients. Needs python3 with venv, npm, and their package indexes
# as they are configured on this machine; 250 MB, a minute. `.complete` is written last.
set -eu

cache=${DPSERVE_CLIENTS_CACHE:-$HOME/.cache/dpserve/clients}
if [ -e "$cache/.complete" ]; then
	echo "the clients are in $cache"
	exit 0
fi
echo "installing clients into $cache"
rm -rf "$cache/venv" "$cache/node_modules"
mkdir -p "$cache"
cd "$cache"
python3 -m venv venv
venv/bin/pip install -q --no-cache-dir --disable-pip-version-check \
	openai==3.57.0 anthropic==2.14.0 openai-agents==0.24.0
npm install --silent --no-audit --no-fund --prefix "$cache" openai@6.49.0 ai@6.0.326 @ai-sdk/openai@3.0.141
: >.complete
echo "the clients are in $cache"

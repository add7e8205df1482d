#!/bin/sh
# Installs Ray Serve's command line into a cache folder outside the repository, once: $DPSERVE_RAY_CACHE, by default
# ~/.cache/dpserve/ray. Needs python3 with venv, and its package index as it is configured on this machine; 500 MB, a
# minute. `.complete` is written last.
set -eu

cache=${DPSERVE_RAY_CACHE:-$HOME/.cache/dpserve/ray}
if [ -e "$cache/.complete" ]; then
	echo "Ray's command line is in $cache"
	exit 0
fi
echo "installing Ray's command line into $cache"
rm -rf "$cache/venv"
mkdir -p "$cache"
cd "$cache"
python3 -m venv venv
venv/bin/pip install -q --no-cache-dir --disable-pip-version-check 'ray[serve]==2.60.0'
: >.complete
echo "Ray's command line is in $cache"

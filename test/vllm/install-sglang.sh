#!/bin/sh
# Installs SGLang for the CPU into a cache folder outside the repository, once: $DPSERVE_SGLANG_CACHE, by default
# ~/.cache/dpserve/sglang-cpu-$VERSION. `.complete` is written last; where it is missing the installation begins anew.
# SGLang has no wheel for CPUs: its own is installed without what needs CUDA, and a stub takes the place of its kernels.
# Needs python3.11 with venv and a package index, as pip is configured on this machine; 7 GB of disk, minutes. PYTHON
# names another interpreter of that version.
set -eu

VERSION=0.5.23
TORCH=2.14.1
here=$(cd "$(dirname "$0")" && pwd)
cache=${DPSERVE_SGLANG_CACHE:-$HOME/.cache/dpserve/sglang-cpu-$VERSION}
python=${PYTHON:-python3.11}

if [ -e "$cache/.complete" ]; then
	echo "sglang $VERSION is in $cache"
	exit 0
fi
. "$here/installable.sh"
installable "sglang $VERSION" DPSERVE_SGLANG_CACHE

echo "installing sglang $VERSION into $cache (some minutes)"
rm -rf "$cache/venv"
cd "$cache"
"$python" -m venv venv
pip="venv/bin/pip install -q --no-cache-dir --disable-pip-version-check -c $here/testdata/constraints-sglang.txt"
$pip "torch==$TORCH" torchvision transformers tokenizers
$pip aiohttp anthropic apache-tvm-ffi blobfile build compressed-tensors datasets distro easydict einops fastapi gguf \
	interegular IPython kernels llguidance mistral_common modelscope msgspec ninja numba nvidia-ml-py openai \
	openai-harmony orjson outlines partial_json_parser pillow prometheus-client psutil pybase64 pydantic \
	python-multipart pyzmq requests scipy sentencepiece setproctitle soundfile tiktoken timm torch_memory_saver \
	tqdm uvicorn uvloop watchfiles xgrammar xxhash zstandard
$pip --no-deps "sglang==$VERSION"
cp "$here/testdata/sgl_kernel.py" "$(venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/"
SGLANG_USE_CPU_ENGINE=1 venv/bin/python -c 'import sglang.srt.layers.layernorm'
: >.complete
echo "sglang $VERSION is in $cache"

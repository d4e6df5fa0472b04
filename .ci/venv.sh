#!/usr/bin/env bash
# venv.sh DIR [PIP-INSTALL-ARGUMENT...]: makes a virtual environment in DIR where there is none and installs into it.
# On a fresh Debian the venv module is a package of its own: root gets it installed, everyone else is told its name.
set -euo pipefail

directory=$1
shift

# debian_package NAME: installs it, as root on Debian; fails elsewhere.
debian_package() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    echo "kvtier: installing Debian's $1" >&2
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1" >&2
}

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
    python=$(find_python) || { debian_package python3-venv && python=$(find_python); } || {
        echo "kvtier: needs Python >= 3.11 with its venv module; on Debian 12: apt-get install python3-venv" >&2
        exit 1
    }
    # ensurepip installs the same wheels, in ten times the time.
    "$python" -m venv --clear --without-pip "$directory"
    wheels='import ensurepip, sysconfig as s; print(s.get_config_var("WHEEL_PKG_DIR") or ensurepip.__path__[0] + "/_bundled")'
    find "$("$python" -c "$wheels")" -name '*.whl' -exec "$python" -m zipfile -e {} "$directory"/lib/python3*/site-packages \;
fi

# setuptools warns at every editable install that the source tree stays in use, which is the point of one
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONWARNINGS=ignore
[ $# = 0 ] || "$directory/bin/python" -m pip install -q "$@"

# Mooncake's wheel needs a library of the system.
if "$directory/bin/python" -c 'import mooncake' 2>/dev/null &&
    ! "$directory/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then
    debian_package libibverbs1 ||
        echo "kvtier: the tests of Mooncake are skipped without libibverbs1; on Debian 12: apt-get install libibverbs1" >&2
fi

"""The process that calls Mooncake, started with ``MASTER PROTOCOL DEVICES METADATA FD``.

Where its master is silent Mooncake's library stops the whole interpreter, so the daemon does not load it. Requests are
lines of JSON, ``[verb, keys, sizes]``; a reply is a line with a number for each key. Objects stand in the memory behind
``FD``, one after the other.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from mooncake.store import MooncakeDistributedStore

from kvtierd.tiers.remote.mooncake import MASTER_GONE, TOO_LONG

_CONNECT_S: Final = 2.0
_PR_SET_PDEATHSIG: Final = 1


def main(master: str, protocol: str, devices: str, metadata: str, fd: str) -> None:
    """Answers requests until its standard input ends."""
    # A call of the library may return much later than the daemon is dead.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w")
    for chatter in (1, 2):  # the library logs each miss
        os.dup2(os.open(os.devnull, os.O_WRONLY), chatter)
    shared = mmap.mmap(int(fd), 0)
    start = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    store = MooncakeDistributedStore()
    code = _set_up(store, master, protocol, devices, metadata) or store.register_buffer(start, len(shared))
    print(json.dumps([code]), file=replies, flush=True)
    for line in sys.stdin:
        verb, keys, sizes = json.loads(line)
        places = [start + at for at in accumulate(sizes, initial=0)][: len(sizes)]
        print(json.dumps(_VERBS[verb](store, keys, places, sizes)), file=replies, flush=True)
    os._exit(0)  # without the library's farewell to a master that may be silent


def _set_up(store: MooncakeDistributedStore, master: str, protocol: str, devices: str, metadata: str) -> int:
    host, _, port = master.rpartition(":")
    try:
        # The library tries for minutes. The connection also shows which address of this host others can reach.
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as tried:
            local = tried.getsockname()[0]
    except OSError:
        return MASTER_GONE
    return int(store.setup(local, metadata, 0, 0, protocol, devices, master))


def _get(store: MooncakeDistributedStore, keys: list[str], places: list[int], sizes: list[int]) -> list[int]:
    codes = store.batch_get_into(keys, places, sizes)
    return [store.get_size(key) if code == TOO_LONG else code for key, code in zip(keys, codes, strict=True)]


_VERBS: Final[Mapping[str, Callable[[MooncakeDistributedStore, list[str], list[int], list[int]], Sequence[int]]]] = {
    "exists": lambda store, keys, places, sizes: store.batch_is_exist(keys),
    "get": _get,
    "put": lambda store, keys, places, sizes: store.batch_put_from(keys, places, sizes),
    "delete": lambda store, keys, places, sizes: store.batch_remove(keys, True),
}

if __name__ == "__main__":
    main(*sys.argv[1:])

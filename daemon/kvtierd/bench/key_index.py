"""A key index as the daemon writes it, in a file: ``python -m kvtierd.bench.key_index KEYS CONTROL``.

``KEYS`` has packed keys; ``CONTROL`` becomes the control segment of a cache with as many slots, in whose index they all
are in slots of the host tier.
"""

from __future__ import annotations

import mmap
import secrets
import sys
from pathlib import Path

import numpy as np

from kvtier.abi.keys import KEY_BYTES
from kvtier.abi.layout import DISK, ArenaIdentity, ArenaLayout
from kvtier.abi.records import INDEX_SEED_BYTES
from kvtier.abi.spec import CacheSpec
from kvtierd.core.ids import Tier
from kvtierd.tiers.index_rebuild import Many
from kvtierd.tiers.key_index import KeyIndex


def write(keys: Path, control: Path) -> None:
    packed = np.fromfile(keys, dtype="<u8").reshape(-1, KEY_BYTES // 8)
    count = len(packed)
    spec = CacheSpec.single("bench", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=8)
    layout = ArenaLayout.plan(spec, {(0, DISK): count})  # as many places in the index, and no slots beside it
    with control.open("xb+") as file:
        file.truncate(layout.control_bytes)
        segment = np.frombuffer(mmap.mmap(file.fileno(), layout.control_bytes), dtype=np.uint8)
        identity = ArenaIdentity(spec.fingerprint(), epoch=1, boot=1, pid=1)
        layout.initialise(segment, identity, secrets.token_bytes(INDEX_SEED_BYTES))
        places = np.zeros((count, 3), dtype=np.uint64)
        places[:, 0] = 2
        places[:, 2] = np.arange(count)
        residency = np.full(count, Tier.HOST.bit, dtype=np.uint8)
        KeyIndex(layout, segment, epoch=1).rebuild(Many(packed, np.zeros(count, np.uint64), residency, places))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))

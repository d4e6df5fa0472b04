"""Small arenas, and processes that play their clients."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from kvtier.abi.control import ArenaIdentity
from kvtier.abi.layout import DEVICE, DISK, HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtierd.core.ids import GroupId
from kvtierd.tiers.arena import Arena

GROUP = GroupId(0)
POOL_BYTES = (10_000, 300)
"""Bytes of a block in each of the two pools: one longer and one shorter than what poison stamps."""

SPEC = CacheSpec(
    "m", "uint8", 1, groups=(WindowGroupSpec(pools=tuple(PoolSpec(1, 1, size // 2) for size in POOL_BYTES)),)
)


def make_arena(name: str = "unit", *, device: int = 4, host: int = 6) -> Arena:
    layout = ArenaLayout.plan(SPEC, {(0, DEVICE): device, (0, HOST): host, (0, DISK): 9})
    return Arena.create(name, layout, ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=3, pid=1))


def parts(layout: ArenaLayout, tier: int, group: int, slot: int) -> list[tuple[int, int]]:
    """Offset and size of a slot's exact bytes in the tier's data segment, one a pool, by the rules of the layout."""
    place = layout.groups[group]
    if tier == DEVICE:
        return [(pool.device_offset + slot * pool.padded_bytes, pool.block_bytes) for pool in place.pools]
    start = place.host_offset + slot * place.record_bytes
    return [(start + pool.record_offset, pool.block_bytes) for pool in place.pools]


def start_client(script: str, *fds: int) -> subprocess.Popen[str]:
    """Runs ``script`` in a process that inherits ``fds`` under their numbers, in the list ``fds``."""
    preamble = "import ctypes, errno, mmap, os, sys\nimport numpy as np\nfds = [int(n) for n in sys.argv[1:]]\n"
    return subprocess.Popen(
        [sys.executable, "-c", preamble + textwrap.dedent(script), *map(str, fds)],
        pass_fds=fds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_client(client: subprocess.Popen[str]) -> str:
    """What it printed, once it has ended well."""
    said, complaint = client.communicate(timeout=60)
    assert client.returncode == 0, complaint
    return said.strip()


def run_client(script: str, *fds: int) -> str:
    """Both in one."""
    return finish_client(start_client(script, *fds))


def mapped_segments(name: str) -> int:
    """How many segments of arena ``name`` this process maps."""
    maps = Path("/proc/self/maps").read_text()
    return len({line.split()[4] for line in maps.splitlines() if f"kvtier:{name}:" in line})

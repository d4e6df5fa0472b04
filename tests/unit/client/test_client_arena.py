"""A mapped arena as a client sees it, over segments made by the daemon's own hand."""

import gc
import os
from dataclasses import replace

import pytest

from kvtier.abi.control import ArenaIdentity
from kvtier.abi.layout import DEVICE, DISK, HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.arena import MappedArena
from kvtier.errors import DaemonError
from kvtier.types import Tier
from kvtierd.tiers.arena import Arena as DaemonArena

POOL_BYTES = (6000, 160)
SPEC = CacheSpec(
    "two-pools", "uint8", 1, groups=(WindowGroupSpec(pools=tuple(PoolSpec(1, 1, n, 1) for n in POOL_BYTES)),)
)


def make(device: int = 3, host: int = 5) -> DaemonArena:
    layout = ArenaLayout.plan(SPEC, {(0, DEVICE): device, (0, HOST): host, (0, DISK): 9})
    return DaemonArena.create("client", layout, ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=2, pid=3))


def mapped(daemon: DaemonArena, *, write: bool) -> MappedArena:
    return MappedArena(daemon.shared(write=write).fds, write=write, spec=SPEC)


def test_a_view_outlives_daemon_and_arena_object() -> None:
    daemon = make()
    arena = mapped(daemon, write=True)
    (view, _) = arena.view(Tier.DEVICE, 0, 1, write=True)
    view[:] = 7
    daemon.close()
    del arena, daemon
    gc.collect()
    assert (view == 7).all()


def test_memory_is_unmapped_when_nothing_points_at_it_any_more() -> None:
    daemon = make()
    inodes = [os.fstat(fd).st_ino for fd in daemon.shared(write=False).fds.values()]

    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum(int(line.split()[4]) in inodes for line in maps)

    before = mappings()
    arena = mapped(daemon, write=False)
    assert mappings() == before + len(inodes)
    del arena
    gc.collect()
    assert mappings() == before
    daemon.close()


def test_segments_of_another_specification_are_refused() -> None:
    daemon = make()
    with pytest.raises(DaemonError, match="that of the specification"):
        MappedArena(daemon.shared(write=False).fds, write=False, spec=replace(SPEC, model="another"))
    daemon.close()


def test_a_data_segment_shorter_than_its_layout_is_refused() -> None:
    big, small = make(), make(device=0, host=1)
    fds = dict(big.shared(write=False).fds) | {"host": small.shared(write=False).fds["host"]}
    with pytest.raises(DaemonError, match="a segment of"):
        MappedArena(fds, write=False, spec=SPEC)
    big.close()
    small.close()

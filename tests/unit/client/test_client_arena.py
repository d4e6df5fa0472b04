"""A mapped arena as a client sees it, over segments made by the daemon's own hand."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import numpy as np
import pytest

from kvtier.abi.control import ArenaIdentity
from kvtier.abi.layout import DEVICE, DISK, HOST, ArenaLayout
from kvtier.abi.spec import CacheSpec, PoolSpec, WindowGroupSpec
from kvtier.arena import Arena
from kvtier.errors import DaemonError
from kvtier.types import Tier
from kvtierd.core.ids import GroupId, SlotId
from kvtierd.core.ids import Tier as DaemonTier
from kvtierd.tiers.arena import Arena as DaemonArena

POOL_BYTES = (6000, 160)
SPEC = CacheSpec(
    "two-pools", "uint8", 1, groups=(WindowGroupSpec(pools=tuple(PoolSpec(1, 1, n, 1) for n in POOL_BYTES)),)
)


def make(device: int = 3, host: int = 5) -> DaemonArena:
    layout = ArenaLayout.plan(SPEC, {(0, DEVICE): device, (0, HOST): host, (0, DISK): 9})
    return DaemonArena.create("client", layout, ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=2, pid=3))


def mapped(daemon: DaemonArena, *, write: bool) -> Arena:
    return Arena(daemon.shared(write=write).fds, write=write, spec=SPEC)


def test_what_one_mapping_writes_the_other_reads_at_the_same_slot() -> None:
    daemon = make()
    writer, reader = mapped(daemon, write=True), mapped(daemon, write=False)
    rng = np.random.default_rng(1)
    for tier in (Tier.DEVICE, Tier.HOST):
        for slot in range(writer.slots(tier, 0)):
            parts = [rng.integers(0, 256, n, dtype=np.uint8) for n in POOL_BYTES]
            for view, part in zip(writer.view(tier, 0, slot, write=True), parts, strict=True):
                view[:] = part
            for view, part in zip(reader.view(tier, 0, slot, write=False), parts, strict=True):
                assert np.array_equal(view, part)
    daemon.close()


def test_slots_do_not_overlap() -> None:
    daemon = make()
    arena = mapped(daemon, write=True)
    for tier in arena.tiers:
        for slot in range(arena.slots(tier, 0)):
            for view in arena.view(tier, 0, slot, write=True):
                view[:] = slot + 1
        for slot in range(arena.slots(tier, 0)):
            assert all((view == slot + 1).all() for view in arena.view(tier, 0, slot, write=False))
    daemon.close()


def test_views_are_writable_only_where_asked_and_mapped_so() -> None:
    daemon = make()
    arena = mapped(daemon, write=True)
    for view in arena.view(Tier.HOST, 0, 0, write=False):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    for view in mapped(daemon, write=False).view(Tier.HOST, 0, 0, write=True):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    daemon.close()


def test_generations_are_seen_as_the_daemon_moves_them() -> None:
    daemon = make()
    arena = mapped(daemon, write=False)
    slots = np.array([0, 2])
    before = arena.generations(Tier.DEVICE, 0, slots)
    assert (before % 2 == 1).all()
    daemon.end_writes(DaemonTier.DEVICE, GroupId(0), [SlotId(2)])
    after = arena.generations(Tier.DEVICE, 0, slots)
    assert after[0] == before[0]
    assert after[1] == before[1] + 1
    daemon.close()


def test_only_tiers_that_the_cache_has_are_mapped() -> None:
    daemon = make(device=0)
    arena = mapped(daemon, write=True)
    assert arena.tiers == (Tier.HOST,)
    assert arena.slots(Tier.DEVICE, 0) == 0
    daemon.close()


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
        Arena(daemon.shared(write=False).fds, write=False, spec=replace(SPEC, model="another"))
    daemon.close()


def test_a_data_segment_shorter_than_its_layout_is_refused() -> None:
    big, small = make(), make(device=0, host=1)
    fds = dict(big.shared(write=False).fds) | {"host": small.shared(write=False).fds["host"]}
    with pytest.raises(DaemonError, match="a segment of"):
        Arena(fds, write=False, spec=SPEC)
    big.close()
    small.close()


def test_garbage_is_no_control_segment() -> None:
    fd = os.memfd_create("garbage")
    os.truncate(fd, 8192)
    with pytest.raises(DaemonError, match="cannot be trusted"):
        Arena({"control": fd}, write=False, spec=SPEC)
    os.close(fd)

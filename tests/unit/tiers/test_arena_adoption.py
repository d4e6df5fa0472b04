"""Segments of an earlier daemon: what is believed of them, and everything for which they are refused."""

import fcntl
import gc
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvtier.abi import attach
from kvtier.abi.control import ArenaIdentity
from kvtier.abi.layout import ArenaLayout
from kvtier.abi.spec import CacheSpec
from kvtierd.core.block import Block
from kvtierd.core.ids import GroupId, Key, Label, SessionId, SlotId, Tier, Traits
from kvtierd.core.policy import GroupShape
from kvtierd.core.recovery import RecoveredBlock
from kvtierd.service.recovery import NOBODY, OldLife, adopt
from kvtierd.tiers.arena import Arena
from kvtierd.tiers.base import NotAdoptable

SPEC = CacheSpec.single("model", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=128)
SLOTS = {(0, int(Tier.DEVICE)): 2, (0, int(Tier.HOST)): 6}
LAYOUT = ArenaLayout.plan(SPEC, SLOTS)
MADE = ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=3, pid=1)
OURS = replace(MADE, boot=4)
GROUP = GroupId(0)
WINDOW = GroupShape(GROUP, {Tier.DEVICE: 2, Tier.HOST: 6}, dict.fromkeys((Tier.DEVICE, Tier.HOST), 4096))
TRAITS = Traits(35, 9, 0, Label(b"\7" * 8))
SLIDING = replace(WINDOW, window_tokens=16, tokens_per_block=16)


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


@pytest.fixture
def earlier() -> Iterator[Arena]:
    arena = Arena.create("c", LAYOUT, MADE)
    yield arena
    arena.close()


def kept(arena: Arena) -> dict[str, int]:
    """As a service manager passes them on: descriptors of their own."""
    return {segment: os.dup(fd) for segment, fd in arena.kept_fds.items()}


def written(arena: Arena, slot: int, number: int, parent: int | None) -> None:
    block = Block(key(number), None if parent is None else key(parent), None, TRAITS)
    arena.note(Tier.HOST, GROUP, {SlotId(slot): block})
    arena.end_writes(Tier.HOST, GROUP, [SlotId(slot)])


def adopted(arena: Arena) -> Arena:
    return Arena.adopt("c", LAYOUT, OURS, kept(arena))


def put(segment: str, offset: int, data: bytes) -> Callable[[Arena, dict[str, int]], None]:
    def damage(arena: Arena, fds: dict[str, int]) -> None:
        os.pwrite(fds[segment], data, offset)

    return damage


def without(segment: str) -> Callable[[Arena, dict[str, int]], None]:
    def damage(arena: Arena, fds: dict[str, int]) -> None:
        os.close(fds.pop(segment))

    return damage


def instead_of(segment: str, make: Callable[[Arena], int]) -> Callable[[Arena, dict[str, int]], None]:
    def damage(arena: Arena, fds: dict[str, int]) -> None:
        os.close(fds[segment])
        fds[segment] = make(arena)

    return damage


def _memfd(size: int, *, seals: int = 0, mode: int = 0o400) -> int:
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.fchmod(fd, mode)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _all_seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


DAMAGES = {
    "another magic": (put(attach.CONTROL, 0, b"X"), "header.magic"),
    "another ABI": (put(attach.CONTROL, 8, struct.pack("<I", 3)), "header.abi_version"),
    "another specification": (put(attach.CONTROL, 40, b"XXXX"), "header.crc"),
    "torn slots": (put(attach.CONTROL, 104, b"\1"), "header.crc"),
    "a generation from nowhere": (
        put(attach.CONTROL, LAYOUT.groups[0].generations[Tier.HOST] + 8, struct.pack("<Q", 7)),
        "generation",
    ),
    "no control": (without(attach.CONTROL), "a part was not kept"),
    "no host": (without(attach.HOST), "a part was not kept"),
    "another size": (instead_of(attach.HOST, lambda _: _memfd(4096, seals=_all_seals())), "size"),
    "no seals": (instead_of(attach.HOST, lambda _: _memfd(LAYOUT.host_bytes)), "seals"),
    "a mode that lets others write": (
        instead_of(attach.HOST, lambda _: _memfd(LAYOUT.host_bytes, seals=_all_seals(), mode=0o600)),
        "mode",
    ),
    "a read-only one": (
        instead_of(attach.HOST, lambda arena: os.dup(arena.shared(write=False).fds[attach.HOST])),
        "open for writing",
    ),
    "no memory at all": (instead_of(attach.HOST, lambda _: os.open("/dev/null", os.O_RDWR)), "regular file"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES.keys())
def test_any_doubt_is_a_refusal(earlier: Arena, damage: Callable[[Arena, dict[str, int]], None], says: str) -> None:
    fds = kept(earlier)
    damage(earlier, fds)
    gc.collect()  # what earlier tests left open is not closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotAdoptable, match=says):
        Arena.adopt("c", LAYOUT, OURS, fds)
    assert len(os.listdir("/proc/self/fd")) == before, "the caller's descriptors are still its own, and no others"
    for fd in fds.values():
        os.close(fd)


@pytest.mark.parametrize(
    ("ours", "layout", "says"),
    [
        (replace(OURS, fingerprint=bytes(32)), LAYOUT, "specification"),
        (OURS, ArenaLayout.plan(SPEC, {(0, int(Tier.HOST)): 6}), "no room for its device tier any more"),
        (replace(OURS, boot=3), LAYOUT, "another state directory"),
    ],
)
def test_what_is_not_this_caches_is_refused(
    earlier: Arena, ours: ArenaIdentity, layout: ArenaLayout, says: str
) -> None:
    fds = kept(earlier)
    with pytest.raises(NotAdoptable, match=says):
        Arena.adopt("c", layout, ours, fds)
    for fd in fds.values():
        os.close(fd)


def found(arena: Arena, shape: GroupShape = WINDOW) -> list[RecoveredBlock]:
    return adopt(arena, [shape], {}, NOBODY).recovered[GROUP]


def test_only_slots_whose_record_is_whole_and_of_their_generation_count(earlier: Arena) -> None:
    for slot in range(5):
        written(earlier, slot, number=slot, parent=None)
    start = LAYOUT.groups[0].records[Tier.HOST]
    os.pwrite(earlier.kept_fds[attach.CONTROL], b"XX", start + 192)  # 1: torn
    earlier.begin_writes(Tier.HOST, GROUP, [SlotId(2)])  # 2: being written
    earlier.begin_writes(Tier.HOST, GROUP, [SlotId(3)])
    earlier.end_writes(Tier.HOST, GROUP, [SlotId(3)])  # 3: written anew, and the record is the old one
    again = adopted(earlier)
    assert [(one.key, one.host, one.traits) for one in found(again)] == [(key(0), 0, TRAITS), (key(4), 4, TRAITS)]
    odd = [again.generation(Tier.HOST, GROUP, SlotId(slot)) % 2 for slot in range(6)]
    assert odd == [0, 1, 1, 1, 0, 1], "whoever still looks at the others finds out"
    again.close()


def test_blocks_without_their_ancestors_do_not_count_unless_the_window_slides(earlier: Arena) -> None:
    written(earlier, 0, number=2, parent=1)
    written(earlier, 1, number=1, parent=0)
    written(earlier, 2, number=5, parent=None)
    written(earlier, 3, number=6, parent=5)
    again = adopted(earlier)
    assert {one.key for one in found(again, SLIDING)} == {key(2), key(1), key(5), key(6)}
    assert [one.key for one in found(again)] == [key(5), key(6)]
    again.close()


def test_what_live_processes_may_touch_is_left_to_them(earlier: Arena) -> None:
    written(earlier, 0, number=1, parent=None)
    written(earlier, 1, number=9, parent=8)  # unreachable
    written(earlier, 2, number=2, parent=None)
    for slot, owner in ((0, 5), (1, 6), (3, 5), (4, 6)):
        earlier.set_owners(Tier.HOST, GROUP, {SlotId(slot): SessionId(owner)})
    again = adopted(earlier)
    old = OldLife(live=frozenset({SessionId(5)}), dead=frozenset({SessionId(6)}), keeper=SessionId(99))
    left = adopt(again, [WINDOW], {}, old).left
    assert {(lease.session, lease.blank, lease.keys) for lease in left} == {
        (99, (1,), ()),  # a reader, perhaps the live one, may still look at what is no block any more
        (5, (3,), ()),
        (99, (), (key(1),)),
    }
    assert again.owned(Tier.HOST, GROUP) == {0: 5, 1: 99, 3: 5}, "a daemon that dies before it grants them again"
    again.close()


def test_a_life_that_dies_while_it_adopts_forgets_no_reader(earlier: Arena) -> None:
    """The owner table names the last of several readers: when that one has gone, the slot is not free yet."""
    written(earlier, 1, number=9, parent=8)  # unreachable
    earlier.set_owners(Tier.HOST, GROUP, {SlotId(1): SessionId(6)})
    again = adopted(earlier)
    both = frozenset({SessionId(5), SessionId(6)})
    adopt(again, [WINDOW], {}, OldLife(both, frozenset(), keeper=SessionId(99)))
    one = OldLife(frozenset({SessionId(5)}), frozenset({SessionId(6)}), keeper=SessionId(100))
    (lease,) = adopt(again, [WINDOW], {}, one).left
    assert (lease.session, lease.blank) == (100, (1,))
    again.close()


def test_what_a_life_kept_for_readers_is_kept_by_the_next(earlier: Arena) -> None:
    written(earlier, 1, number=9, parent=8)  # unreachable, and perhaps looked at
    earlier.set_owners(Tier.HOST, GROUP, {SlotId(1): SessionId(5)})
    once = adopted(earlier)
    reader = frozenset({SessionId(5)})
    (lease,) = adopt(once, [WINDOW], {}, OldLife(reader, frozenset(), keeper=SessionId(99))).left
    assert (lease.session, lease.blank) == (99, (1,))
    once.set_owners(Tier.HOST, GROUP, {SlotId(1): lease.session})
    (lease,) = adopt(once, [WINDOW], {}, OldLife(reader, frozenset(), keeper=SessionId(100))).left
    assert (lease.session, lease.blank) == (100, (1,))
    once.close()


def test_nobody_alive_leaves_nothing_behind(earlier: Arena) -> None:
    written(earlier, 0, number=1, parent=None)
    earlier.set_owners(Tier.HOST, GROUP, {SlotId(0): SessionId(5)})
    earlier.set_owners(Tier.HOST, GROUP, {SlotId(1): SessionId(5)})
    again = adopted(earlier)
    assert adopt(again, [WINDOW], {}, NOBODY).left == []
    assert again.owned(Tier.HOST, GROUP) == {}
    again.close()

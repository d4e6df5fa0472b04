"""What a caller of the disk tier may ask for. Raises :class:`TierConfigError` for what is malformed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvtier.abi.spec import PAGE
from kvtierd.core.errors import InvariantViolation
from kvtierd.core.ids import KEY_BYTES, GroupId, Key, SlotId
from kvtierd.core.traits import EVENT_HASH_BYTES, MAX_TOKEN_BYTES, Traits
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.disk.slab import MAX_PARTS
from kvtierd.tiers.disk.table import GroupTable
from kvtierd.tiers.disk.values import DiskRead, DiskWrite, SlabShape
from kvtierd.tiers.parts import Part

_MOST_PRIORITY: Final = 100
_MOST_DURATION_MS: Final = (1 << 32) - 1
_MOST_DEADLINE_NS: Final = (1 << 63) - 1


def check_writes(
    writes: Sequence[DiskWrite], tables: Mapping[GroupId, GroupTable], shapes: Mapping[GroupId, SlabShape]
) -> None:
    """:class:`InvariantViolation` for a slot that holds a block, or that two are to be written to. ``tables``: of the
    groups of all of them."""
    slots: set[tuple[GroupId, SlotId]] = set()
    keys: set[tuple[GroupId, Key]] = set()
    checked: Traits | None = None
    for group, slot, key, parent, traits, parts in writes:
        _check_place(shapes[group], slot, key)
        check_parts(parts, shapes[group].record_bytes, writable=False)
        if parent is not None and len(parent) != KEY_BYTES:
            raise TierConfigError("parent", parent.hex(), f"{KEY_BYTES} bytes")
        if traits is not checked:  # mostly the same for a whole chain
            check_traits(traits)
            checked = traits
        holder = tables[group].key_at(slot)
        if holder is not None:
            raise InvariantViolation(f"disk slot {slot} still holds block {holder.hex()}")
        slots.add((group, slot))
        keys.add((group, key))
    if len(slots) < len(writes) or len(keys) < len(writes):
        raise InvariantViolation("two writes of one batch to the same disk slot or of the same block")


def check_read(read: DiskRead, shape: SlabShape) -> None:
    """``shape``: of its group."""
    _, slot, key, parts = read
    _check_place(shape, slot, key)
    check_parts(parts, shape.record_bytes, writable=True)


def check_traits(traits: Traits) -> None:
    priority, duration_ms, deadline_ns, label = traits
    if not 0 <= priority <= _MOST_PRIORITY:
        raise TierConfigError("priority", priority, f"0 to {_MOST_PRIORITY}")
    if not 0 <= duration_ms <= _MOST_DURATION_MS:
        raise TierConfigError("duration_ms", duration_ms, f"0 to {_MOST_DURATION_MS}")
    if not 0 <= deadline_ns <= _MOST_DEADLINE_NS:
        raise TierConfigError("deadline_ns", deadline_ns, f"0 to {_MOST_DEADLINE_NS}")
    if label is not None:
        if len(label.event_hash) not in EVENT_HASH_BYTES:
            raise TierConfigError("event_hash", f"{len(label.event_hash)} bytes", "0, 8 or 32 bytes")
        if len(label.tokens) > MAX_TOKEN_BYTES:
            raise TierConfigError("tokens", f"{len(label.tokens)} bytes", f"at most {MAX_TOKEN_BYTES} bytes")


def check_parts(parts: Sequence[Part], record_bytes: int, *, writable: bool) -> None:
    """They are fit for direct I/O and make up exactly one record.

    Checked here because not every disk does: some take a misaligned buffer, and the next one answers EINVAL.
    """
    if not 1 <= len(parts) <= MAX_PARTS:
        raise TierConfigError("parts", len(parts), f"1 to {MAX_PARTS} arrays")
    total = 0
    for number, part in enumerate(parts):
        if writable and part.memory.readonly:
            raise TierConfigError(f"parts[{number}]", "read-only", "a writable array")
        address, nbytes = part.address, part.nbytes
        memory = part.memory
        if memory.ndim != 1 or memory.format != "B" or not memory.contiguous or memory.nbytes != nbytes:
            said = f"{memory.nbytes} bytes of format {memory.format}, {memory.ndim} dimensions"
            raise TierConfigError(f"parts[{number}]", said, f"{nbytes} contiguous bytes (uint8), 1-D")
        if address % PAGE:
            raise TierConfigError(f"parts[{number}].address", hex(address), f"a multiple of {PAGE}")
        if nbytes <= 0 or nbytes % PAGE:
            raise TierConfigError(f"parts[{number}].nbytes", nbytes, f"a positive multiple of {PAGE}")
        total += nbytes
    if total != record_bytes:
        raise TierConfigError("parts", f"{total} bytes", f"one record of {record_bytes} bytes")


def _check_place(shape: SlabShape, slot: SlotId, key: Key) -> None:
    if not 0 <= slot < shape.slots:
        raise TierConfigError("slot", slot, f"0 to {shape.slots - 1}")
    if len(key) != KEY_BYTES:
        raise TierConfigError("key", key.hex(), f"{KEY_BYTES} bytes")

"""The words of an arena's header that change while it lives. The daemon writes them, whoever maps ``control`` reads."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.errors import AbiError
from kvtier.abi.records import EVENT_EPOCH_OFFSET, LAST_EVENT_OFFSET, STATE_OFFSET, UNINDEXED_OFFSET


class ArenaState(IntEnum):
    OPENING = 0
    SERVING = 1
    CLOSED = 2


class Shown(NamedTuple):
    """The last event whose effect the key index shows: an event id counts in its epoch only."""

    epoch: int
    event: int


_WORD: Final = 8
_TRIES: Final = 3


def read_state(control: NDArray[np.uint8]) -> ArenaState:
    """The daemon's word on the segment. Raises :class:`AbiError` for a value that has no meaning."""
    return as_state(int(control[STATE_OFFSET : STATE_OFFSET + 4].view("<u4")[0]))


def write_state(control: NDArray[np.uint8], state: ArenaState) -> None:
    """For the daemon only."""
    control[STATE_OFFSET : STATE_OFFSET + 4].view("<u4")[0] = state


def as_state(value: int) -> ArenaState:
    """Raises :class:`AbiError` for a value that has no meaning."""
    if value not in ArenaState.__members__.values():
        raise AbiError("header.state", value, "0, 1 or 2")
    return ArenaState(value)


def words_of(control: NDArray[np.uint8]) -> memoryview:
    """The segment as u64, each read and written by one aligned access."""
    return control[: len(control) // _WORD * _WORD].data.cast("Q")


def read_shown(words: memoryview) -> Shown:
    """``words``: :func:`words_of` the segment. While the epoch does not stand still, the event is 0: none is shown."""
    epoch = words[EVENT_EPOCH_OFFSET // _WORD]
    for _ in range(_TRIES):
        before, event = epoch, words[LAST_EVENT_OFFSET // _WORD]
        epoch = words[EVENT_EPOCH_OFFSET // _WORD]
        if epoch == before:
            return Shown(epoch, event)
    return Shown(epoch, 0)


def write_shown(words: memoryview, shown: Shown) -> None:
    """For the daemon only."""
    if words[EVENT_EPOCH_OFFSET // _WORD] != shown.epoch:
        words[LAST_EVENT_OFFSET // _WORD] = 0
        words[EVENT_EPOCH_OFFSET // _WORD] = shown.epoch
    words[LAST_EVENT_OFFSET // _WORD] = shown.event


def read_unindexed(words: memoryview) -> int:
    """Blocks for which the key index had no place."""
    return int(words[UNINDEXED_OFFSET // _WORD])


def write_unindexed(words: memoryview, count: int) -> None:
    """For the daemon only."""
    words[UNINDEXED_OFFSET // _WORD] = count

"""The bytes of slots as tests write and read them, wherever they lie: in this process's memory, or in a device's.

On the fake they are touched where they are, at once and behind its back: a copy that nobody waited for is seen as such.
On a GPU the work goes to torch's current stream, and a read waits for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests import devices

if TYPE_CHECKING:
    from kvtier.abi.cuda.views import DeviceView

Part: TypeAlias = "NDArray[np.uint8] | DeviceView"
"""The part of a slot that lies in one pool."""


def bytes_in(parts: Iterable[Part]) -> NDArray[np.uint8]:
    """A copy of a slot's bytes, all its parts in one array."""
    return np.concatenate([_read(part) for part in parts])


def write_into(parts: Iterable[Part], data: NDArray[np.uint8]) -> None:
    """Fills a slot with a block's bytes."""
    start = 0
    for part in parts:
        _write(part, data[start : start + part.nbytes])
        start += part.nbytes
    assert start == data.nbytes, f"a slot of {start} bytes for {data.nbytes}"


def scribble_into(parts: Sequence[Part], byte: int = 0xEE) -> None:
    """Fills a slot with one byte."""
    write_into(parts, np.full(sum(part.nbytes for part in parts), byte, np.uint8))


def _read(part: Part) -> NDArray[np.uint8]:
    if isinstance(part, np.ndarray):
        return part
    if devices.ON_FAKE:
        return in_place(part).copy()
    copied: NDArray[np.uint8] = part.tensor().cpu().numpy()
    return copied


def _write(part: Part, data: NDArray[np.uint8]) -> None:
    if isinstance(part, np.ndarray):
        part[:] = data
    elif devices.ON_FAKE:
        in_place(part)[:] = data
    else:
        import torch

        part.tensor().copy_(torch.from_numpy(data.copy()))


def in_place(part: DeviceView) -> NDArray[np.uint8]:
    """The part itself, on the fake, whose addresses are this process's own."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * part.nbytes).from_address(part.address))

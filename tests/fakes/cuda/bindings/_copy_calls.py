"""The calls that copy and fill."""

import ctypes
from typing import Final

from ._entry import entry
from ._enums import CUmemcpySrcAccessOrder as _Order
from ._races import check_batch
from ._refusal import invalid
from ._state import LEGACY, STATE
from ._streams import FakeStream
from ._structs import CUdeviceptr, CUmemcpyAttributes, CUstream

_PIECE: Final = 256 << 10
"""Bytes between which a copy lets others have their turn, so that one that races is seen half done."""
_BATCH_COPY: Final = 12080 if STATE.settings.bindings == 12 else 13000
"""The driver's version that brought the call in the form of the bindings."""
_memory: Final = STATE.memory


@entry()
def cuMemcpyAsync(dst: CUdeviceptr | int, src: CUdeviceptr | int, ByteCount: int, hStream: CUstream | int) -> None:
    _give_copies(STATE.stream(int(hStream)), [(int(dst), int(src), ByteCount)] if ByteCount else [])


@entry(int(STATE.settings.bindings == 12))
def cuMemcpyBatchAsync(
    dsts: list[CUdeviceptr],
    srcs: list[CUdeviceptr],
    sizes: list[int],
    count: int,
    attrs: list[CUmemcpyAttributes],
    attrsIdxs: list[int],
    numAttrs: int,
    hStream: CUstream | int,
) -> int:
    if STATE.settings.driver_version < _BATCH_COPY:
        raise RuntimeError('Function "cuMemcpyBatchAsync" not found')
    for values, kind in ((dsts, "CUdeviceptr"), (srcs, "CUdeviceptr"), (sizes, "int"), (attrs, "CUmemcpyAttributes")):
        if not all(type(value).__name__ == kind for value in values):
            raise TypeError(f"an argument is not a list of {kind}")
    if int(hStream) in LEGACY:
        raise invalid("the legacy stream")
    if not count or not len(dsts) == len(srcs) == len(sizes) == count or not all(sizes):
        raise invalid(f"{count} copies: lists of {len(dsts)}, {len(srcs)} and {len(sizes)}, no size of 0")
    if numAttrs != 1 or attrsIdxs != [0] or len(attrs) != 1:
        raise invalid("the fake knows one attribute, of all copies")
    if attrs[0].srcAccessOrder != _Order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM:
        raise invalid("srcAccessOrder is not set")
    copies = [(int(dst), int(src), nbytes) for dst, src, nbytes in zip(dsts, srcs, sizes, strict=True)]
    if any("pageable" in (_kind(dst, nbytes), _kind(src, nbytes)) for dst, src, nbytes in copies):
        raise invalid("pageable memory, of which NVIDIA does not say that a batch takes it everywhere")
    _give_copies(STATE.stream(int(hStream)), copies)
    return 2**64 - 1


if STATE.settings.bindings == 12:
    cuMemcpyBatchAsync.__doc__ = "Returns\n-------\nCUresult\nfailIdx : int"


@entry()
def cuMemsetD8Async(dstDevice: CUdeviceptr | int, uc: int, N: int, hStream: CUstream | int) -> None:
    address = int(dstDevice)
    if not 0 <= uc <= 255:
        raise OverflowError(f"unsigned char of {uc}")
    kind = _kind(address, N)
    if kind == "pageable":
        raise invalid(f"{address:#x} is not memory of CUDA")

    def fill() -> None:
        with STATE.lock:
            if STATE.is_lost():
                return
            _check_unchanged(address, N, kind)
            ctypes.memset(address, uc, N)

    stream = STATE.stream(int(hStream))
    STATE.races.given(stream.number, (), [(address, address + N)])
    stream.give(fill)


def _kind(address: int, nbytes: int) -> str:
    device = _memory.device_of(address, nbytes)
    if device not in (None, STATE.device()):
        raise invalid(f"{address:#x} is memory of device {device}, the context is of device {STATE.device()}")
    return _memory.kind(address, nbytes)


def _give_copies(stream: FakeStream, copies: list[tuple[int, int, int]]) -> None:
    if not copies:
        return
    kinds = [(_kind(dst, nbytes), _kind(src, nbytes)) for dst, src, nbytes in copies]
    check_batch(copies)
    reads = [(src, src + nbytes) for _, src, nbytes in copies]
    STATE.races.given(stream.number, reads, [(dst, dst + nbytes) for dst, _, nbytes in copies])
    stream.give(lambda: _copy(copies[::-1], kinds[::-1]))


def _copy(copies: list[tuple[int, int, int]], kinds: list[tuple[str, str]]) -> None:
    for (dst, src, nbytes), kind in zip(copies, kinds, strict=True):
        for done in range(0, nbytes, _PIECE):
            # With the lock, so that no range goes away under the copy; a real device would fault, or worse.
            with STATE.lock:
                if STATE.is_lost():
                    return
                _check_unchanged(dst, nbytes, kind[0])
                _check_unchanged(src, nbytes, kind[1])
                ctypes.memmove(dst + done, src + done, min(_PIECE, nbytes - done))


def _check_unchanged(address: int, nbytes: int, kind: str) -> None:
    # Pageable memory is copied by the processor, which does not mind that it is page-locked meanwhile.
    if kind != "pageable" and _memory.kind(address, nbytes) != kind:
        raise invalid(f"memory at {address:#x} went away under a copy")

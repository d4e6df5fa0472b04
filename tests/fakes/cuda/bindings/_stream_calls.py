"""The calls about streams and events, and what a kernel is here."""

from collections.abc import Callable
from typing import Any

from ._entry import entry
from ._enums import CUresult, CUstreamCaptureStatus
from ._refusal import Refusal, invalid
from ._state import LEGACY, STATE
from ._structs import CUevent, CUstream


@entry(1)
def cuStreamCreate(Flags: int) -> CUstream:
    number = STATE.new_stream()
    STATE.streams[number].blocking = not Flags
    return CUstream(number)


@entry()
def cuStreamDestroy(hStream: CUstream | int) -> None:
    if int(hStream) in (*LEGACY, 2):
        raise invalid("a default stream")
    stream = STATE.stream(int(hStream))
    STATE.races.gone(stream.number)
    del STATE.streams[int(hStream)]


@entry()
def cuStreamQuery(hStream: CUstream | int) -> None:
    stream = STATE.stream(int(hStream))
    if not stream.idle:
        raise Refusal(CUresult.CUDA_ERROR_NOT_READY, "")
    STATE.races.saw(STATE.races.recorded(stream.number))


@entry(1)
def cuStreamIsCapturing(hStream: CUstream | int) -> CUstreamCaptureStatus:
    _refuse_legacy(hStream)
    return CUstreamCaptureStatus(int(STATE.stream(int(hStream)).capturing))


@entry(1)
def cuEventCreate(Flags: int) -> CUevent:
    return CUevent(STATE.new_event())


@entry()
def cuEventDestroy(hEvent: CUevent | int) -> None:
    STATE.event(int(hEvent))
    del STATE.events[int(hEvent)]


@entry()
def cuEventRecord(hEvent: CUevent | int, hStream: CUstream | int) -> None:
    _refuse_legacy(hStream)
    event, stream = STATE.event(int(hEvent)), STATE.stream(int(hStream))
    if event.context != stream.context:
        raise Refusal(CUresult.CUDA_ERROR_INVALID_HANDLE, "event and stream are of different contexts")
    event.captured = stream.capturing
    event.mark = stream.mark()
    event.given = STATE.races.recorded(stream.number)


@entry()
def cuEventQuery(hEvent: CUevent | int) -> None:
    event = STATE.event(int(hEvent))
    if event.captured:
        raise Refusal(CUresult.CUDA_ERROR_CAPTURED_EVENT, "it was recorded in a stream that was being captured")
    if not event.mark.reached.is_set():
        raise Refusal(CUresult.CUDA_ERROR_NOT_READY, "")
    STATE.races.saw(event.given)


def _refuse_legacy(stream: CUstream | int) -> None:
    captured = any(s.capturing and s.blocking and s.context == STATE.context() for s in STATE.streams.values())
    if int(stream) in LEGACY and captured:
        raise Refusal(CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "a blocking stream is being captured")


def fake_work(stream: int, work: Callable[[], Any]) -> None:
    """Not NVIDIA's: a kernel. ``work`` is done by the stream in its turn; no lock is held meanwhile."""
    with STATE.lock:
        given = STATE.stream(stream)
    given.give(work)


def fake_capture(stream: int, on: bool) -> None:
    """Not NVIDIA's: what the stream is given from now on goes into a graph, as far as events can tell."""
    with STATE.lock:
        STATE.stream(stream).capturing = on


def fake_left() -> dict[str, int]:
    """Not NVIDIA's: what this process has made and not given back, by kind."""
    return STATE.left()

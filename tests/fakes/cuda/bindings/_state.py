"""The process's fake driver: devices, contexts of threads, what exists, what was lost, and how a call is made."""

import atexit
import itertools
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from ._enums import CUresult
from ._memory import Memory
from ._races import Race, Races
from ._refusal import Refusal
from ._settings import Settings, read_settings
from ._streams import FakeEvent, FakeStream

LEGACY: Final = (0, 1)
PER_THREAD: Final = 2
CONTEXT: Final = 0xC0_0000
"""The primary context of the first device that the process sees; the others follow."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.capture_mode = 0


class State:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lock = threading.RLock()
        self.memory = Memory(settings.memory, settings.shared)
        self.races = Races(overtaken=settings.overtaken)
        self.thread = _Thread()
        self.pid = os.getpid()
        self.started = False
        self.retained: Counter[int] = Counter()
        self.streams: dict[int, FakeStream] = {}
        self.events: dict[int, FakeEvent] = {}
        self._numbers = itertools.count(0x7F0001)
        self._seeds = itertools.count(settings.seed * 1000 + 1)
        self._calls: Counter[str] = Counter()
        self._lost: CUresult | None = None
        self._defaults: dict[int, FakeStream] = {}
        if settings.record is not None:
            atexit.register(self._report)

    # What exists. -------------------------------------------------------------------------------------------------

    def visible(self) -> list[int]:
        """Numbers of the devices that CUDA_VISIBLE_DEVICES leaves, in its order."""
        asked = os.environ.get("CUDA_VISIBLE_DEVICES")
        everything = list(range(self.settings.devices))
        if asked is None:
            return everything
        found: list[int] = []
        for word in asked.split(","):
            by_uuid = [n for n in everything if word.strip() and uuid_text(n).startswith(word.strip())]
            number = int(word) if word.strip().isdigit() else (by_uuid[0] if by_uuid else -1)
            if number not in everything:
                break  # as CUDA does: what follows a word that names nothing is not seen either
            found.append(number)
        return found

    def context(self) -> int:
        if not self.thread.contexts or not self.retained[self.thread.contexts[-1]]:
            raise Refusal(CUresult.CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread")
        return self.thread.contexts[-1]

    def device(self) -> int:
        """The number of the current context's."""
        return self.visible()[self.context() - CONTEXT]

    def new_stream(self) -> int:
        number = next(self._numbers)
        self.streams[number] = self._stream(number, self.context())
        return number

    def _stream(self, number: int, context: int) -> FakeStream:
        settings = self.settings
        seed = next(self._seeds)
        return FakeStream(number, context, seed, settings.max_delay_ms / 1000, settings.hold, self._broke)

    def new_event(self) -> int:
        number = next(self._numbers)
        self.events[number] = FakeEvent(self.context())
        return number

    def stream(self, number: int) -> FakeStream:
        """The stream of a handle. 0, 1 and 2 are CUDA's default streams of the current context."""
        context = self.context()
        if number in (*LEGACY, PER_THREAD):
            if context not in self._defaults:
                self._defaults[context] = self._stream(next(self._numbers), context)
            return self._defaults[context]
        stream = self.streams.get(number)
        if stream is None:
            raise _bad_handle(f"no stream {number:#x}: never created, or destroyed already")
        if stream.context != context:
            raise _bad_handle(f"stream {number:#x} is of another context than the current one")
        return stream

    def event(self, number: int) -> FakeEvent:
        event = self.events.get(number)
        if event is None:
            raise _bad_handle(f"no event {number:#x}: never created, or destroyed already")
        return event

    # Calls. -------------------------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], outputs: int, after_loss: bool) -> Any:
        name = function.__name__
        try:
            with self.lock:
                self._check(name, after_loss)
                answer = function(*arguments)
        except Refusal as refusal:
            self._note(name, arguments, refusal.code, refusal.why)
            if isinstance(refusal, Race):
                print(f"fake CUDA: {name}: {refusal.why}", file=sys.stderr, flush=True)
            return (refusal.code, *(None,) * outputs)
        self._note(name, arguments, CUresult.CUDA_SUCCESS)
        if not outputs:
            return (CUresult.CUDA_SUCCESS,)
        return (CUresult.CUDA_SUCCESS, *(answer if outputs > 1 else (answer,)))

    def _check(self, name: str, after_loss: bool) -> None:
        if os.getpid() != self.pid or (not self.started and name not in ("cuInit", "cuDriverGetVersion")):
            raise Refusal(CUresult.CUDA_ERROR_NOT_INITIALIZED, "cuInit was not called in this process")
        count = self._calls[name]
        self._calls[name] += 1
        for failure in self.settings.fail:
            if failure.call == name and failure.after <= count and not 0 < failure.times <= count - failure.after:
                raise Refusal(CUresult[failure.code], "as the test asked")
        if self._lost is None and self.settings.lost is not None and self.settings.lost.exists():
            code = self.settings.lost.read_text().strip()
            self._lost = CUresult[code] if code else CUresult.CUDA_ERROR_LAUNCH_FAILED
        if self._lost is not None and not after_loss and self._loses_here():
            raise Refusal(self._lost, "the device is lost")

    def _broke(self, error: Exception) -> None:
        why = error.why if isinstance(error, Refusal) else repr(error)
        self._note("a stream", (), CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, why)
        self._lost = self._lost or CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

    def _loses_here(self) -> bool:
        only = self.settings.lost_device
        return only is None or (bool(self.thread.contexts) and self.device() == only)

    def is_lost(self) -> bool:
        return self._lost is not None and self.settings.lost_device is None

    # The record. --------------------------------------------------------------------------------------------------

    def _note(self, call: str, arguments: tuple[Any, ...], code: CUresult, why: str = "") -> None:
        if self.settings.record is None:
            return
        line: dict[str, Any] = {"pid": os.getpid(), "thread": threading.current_thread().name, "call": call}
        line["arguments"] = [_plain(argument) for argument in arguments]
        line["code"] = code.name
        if why:
            line["why"] = why
        self._write(line)

    def _report(self) -> None:
        if os.getpid() == self.pid:
            self._write({"pid": self.pid, "left": self.left()})

    def left(self) -> dict[str, int]:
        """What has not been given back, by kind."""
        left = self.memory.left() | {"streams": len(self.streams), "events": len(self.events)}
        left["contexts"] = sum(self.retained.values())
        return {kind: count for kind, count in left.items() if count}

    def _write(self, line: dict[str, Any]) -> None:
        assert self.settings.record is not None
        with open(self.settings.record, "ab", buffering=0) as record:
            record.write(json.dumps(line).encode() + b"\n")


def uuid(number: int) -> bytes:
    return b"kvtier fake " + number.to_bytes(4, "big")


def uuid_text(number: int) -> str:
    digits = uuid(number).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _bad_handle(why: str) -> Refusal:
    return Refusal(CUresult.CUDA_ERROR_INVALID_HANDLE, why)


def _plain(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [_plain(part) for part in argument]
    if isinstance(argument, str | float | None):
        return argument
    try:
        return int(argument)
    except TypeError:
        return str(argument)


STATE: Final = State(read_settings())

"""Kernels of an engine: they write and check slots on streams of this process, some time after they were launched.

What a slot is filled with follows from the block's key and the place of each word, so a check on the device tells every
wrong byte. On a GPU they are torch's, on the fake they are pieces of work of its streams.
"""

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.abi.cuda.driver import Driver
from kvtier.deadline import Stream
from tests import devices
from tests.integration.touching import in_place
from tests.integration.waiting import PATIENCE_S

WORD: Final = 8
_KEY_WORDS: Final = 4
_GARBAGE: Final = 0xEE
_LATE_S: Final = 0.002
"""How late a kernel is at most."""
_CYCLES_PER_S: Final = 1.5e9
"""Of a GPU, about."""


class Wrong(Protocol):
    """How many words were wrong. To be asked for when the kernel is over."""

    def __call__(self) -> int: ...


class Kernels(ABC):
    """Calls return as soon as the work is launched. ``parts``: a slot as a lease on a device shows it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    @abstractmethod
    def stream(self) -> Stream:
        """One more stream, to launch on and for commits and releases to wait for."""

    @abstractmethod
    def finish(self, stream: Stream) -> None:
        """Blocks until all is over that the stream was given."""

    @abstractmethod
    def write(self, parts: Sequence[Any], key: bytes, stream: Stream) -> None:
        """Fills a slot with garbage, and a while later with the key's pattern."""

    @abstractmethod
    def check(self, parts: Sequence[Any], key: bytes, stream: Stream) -> Wrong:
        """Waits a while, and compares a slot with the key's pattern."""

    @abstractmethod
    def scribble_for(self, seconds: float, parts: Sequence[Any], stream: Stream) -> None:
        """Spoils a slot at once, and again and again for so long."""


class TorchKernels(Kernels):
    """``ordinal``: of the device, which becomes torch's current one on this thread. For this thread alone."""

    def __init__(self, ordinal: int, seed: int) -> None:
        import torch

        super().__init__(seed)
        self._torch: Any = torch
        self._torch.cuda.set_device(ordinal)
        self._places: Any = torch.arange(1 << 20, dtype=torch.int64, device="cuda")
        self._keys: dict[bytes, Any] = {}

    def stream(self) -> Stream:
        stream: Stream = self._torch.cuda.Stream()
        return stream

    def finish(self, stream: Stream) -> None:
        with self._torch.cuda.stream(stream):
            self._torch.cuda.current_stream().synchronize()

    def write(self, parts: Sequence[Any], key: bytes, stream: Stream) -> None:
        words = self._words_of(key)
        with self._torch.cuda.stream(stream):
            for part in parts:
                part.tensor().fill_(_GARBAGE)
            self._dawdle()
            for part, start in _placed(parts):
                slot = self._as_words(part)
                self._torch.bitwise_xor(words.repeat(len(slot) // _KEY_WORDS), self._at(start, slot), out=slot)

    def check(self, parts: Sequence[Any], key: bytes, stream: Stream) -> Wrong:
        words = self._words_of(key)
        with self._torch.cuda.stream(stream):
            self._dawdle()
            counts = [
                (slot != words.repeat(len(slot) // _KEY_WORDS) ^ self._at(start, slot)).sum()
                for part, start in _placed(parts)
                for slot in [self._as_words(part)]
            ]

        def wrong() -> int:
            with self._torch.cuda.stream(stream):
                return sum(int(count.item()) for count in counts)

        return wrong

    def scribble_for(self, seconds: float, parts: Sequence[Any], stream: Stream) -> None:
        steps = 50
        with self._torch.cuda.stream(stream):
            for _ in range(steps):
                for part in parts:
                    part.tensor().fill_(_GARBAGE)
                self._torch.cuda._sleep(int(seconds / steps * _CYCLES_PER_S))

    def _words_of(self, key: bytes) -> Any:
        """On the device, copied there before any stream of a test could need it."""
        if key not in self._keys:
            words = np.frombuffer(key, np.int64).copy()
            self._keys[key] = self._torch.from_numpy(words).cuda()
            self._torch.cuda.current_stream().synchronize()
        return self._keys[key]

    def _as_words(self, part: Any) -> Any:
        return part.tensor().view(self._torch.int64)

    def _at(self, start: int, slot: Any) -> Any:
        return self._places[start : start + len(slot)]

    def _dawdle(self) -> None:
        self._torch.cuda._sleep(int(self._random.uniform(0, _LATE_S) * _CYCLES_PER_S))


class FakeKernels(Kernels):
    """On the fake's streams, whose addresses are this process's."""

    def __init__(self, driver: Driver, seed: int) -> None:
        from cuda.bindings import driver as fake

        super().__init__(seed)
        self._driver = driver
        driver.bind()  # a kernel is launched in the context of its thread
        self._launch: Callable[[int, Callable[[], object]], None] = fake.fake_work

    def stream(self) -> Stream:
        return self._driver.stream()

    def finish(self, stream: Stream) -> None:
        over = threading.Event()
        self._launch(_number(stream), over.set)
        assert over.wait(PATIENCE_S)

    def write(self, parts: Sequence[Any], key: bytes, stream: Stream) -> None:
        late = self._random.uniform(0, _LATE_S)

        def kernel() -> None:
            for part in parts:
                in_place(part)[:] = _GARBAGE
            time.sleep(late)
            for part, start in _placed(parts):
                in_place(part).view(np.uint64)[:] = pattern(key, start, part.nbytes // WORD)

        self._launch(_number(stream), kernel)

    def check(self, parts: Sequence[Any], key: bytes, stream: Stream) -> Wrong:
        late, found = self._random.uniform(0, _LATE_S), list[int]()

        def kernel() -> None:
            time.sleep(late)
            right = [pattern(key, start, part.nbytes // WORD) for part, start in _placed(parts)]
            seen = [in_place(part).view(np.uint64) for part in parts]
            found.append(sum(int(np.count_nonzero(a != b)) for a, b in zip(seen, right, strict=True)))

        self._launch(_number(stream), kernel)

        def wrong() -> int:
            assert found, "the kernel is not over: nobody has waited for it"
            return found[0]

        return wrong

    def scribble_for(self, seconds: float, parts: Sequence[Any], stream: Stream) -> None:
        def kernel() -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for part in parts:
                    in_place(part)[:] = _GARBAGE
                time.sleep(_LATE_S)

        self._launch(_number(stream), kernel)


def kernels(driver: Driver, seed: int) -> Kernels:
    """Of the kind that the device takes."""
    return FakeKernels(driver, seed) if devices.ON_FAKE else TorchKernels(driver.ordinal, seed)


def pattern(key: bytes, start: int, words: int) -> NDArray[np.uint64]:
    """The words that belong to a key, from word ``start`` of its block on."""
    places = np.arange(start, start + words, dtype=np.uint64)
    return np.tile(np.frombuffer(key, np.uint64), words // _KEY_WORDS) ^ places


def _placed(parts: Sequence[Any]) -> Iterator[tuple[Any, int]]:
    """Each part with the place in the block of its first word."""
    start = 0
    for part in parts:
        assert part.nbytes % (WORD * _KEY_WORDS) == 0, "a part must begin with the key's first word"
        yield part, start
        start += part.nbytes // WORD


def _number(stream: Stream) -> int:
    assert isinstance(stream, int)
    return stream

"""Readers and writers in processes of their own, on a cache that is too small for what they do to it."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Self

import numpy as np

from kvtier import Tier
from tests import devices
from tests.integration.starting import environment
from tests.integration.torture_blocks import SLOT_BYTES
from tests.integration.torture_parts import CALL_S, Board, Script, board_bytes

_DEVICE: Final = {Tier.DEVICE: 16 * SLOT_BYTES} if devices.ON_CUDA else {}
SIZES: Final = _DEVICE | {Tier.HOST: 32 * SLOT_BYTES, Tier.DISK: 64 * SLOT_BYTES}
"""Of 240 blocks that the parts put, 32 have room in memory, and 64 on disk below it; on CUDA 16 above it."""
_END_S: Final = 3 * CALL_S
_LOOK_S: Final = 0.01


@dataclass(slots=True, frozen=True)
class Report:
    """Sums over all parts; see ``torture_parts.COUNTERS``. ``faults``: what some of them found wrong."""

    sums: dict[str, int]
    restarts: int
    seconds: float
    faults: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{name:>10} {count:>9}" for name, count in (self.sums | {"restarts": self.restarts}).items()]
        return "\n".join([f"torture: {self.seconds:.1f} s", *lines, *self.faults])


class Crowd:
    """Parts that play until the end, on a daemon that serves. Nothing of them is left behind.

    ``parts``: of :data:`tests.integration.torture_parts.PARTS`. ``verifies``: the daemon checks some gets, too.
    """

    def __init__(self, address: str, parts: Sequence[str], seed: int, *, verifies: bool = True) -> None:
        self._began = time.monotonic()
        self._fd = os.memfd_create("torture-board", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, board_bytes(len(parts)))
        self._board = Board(self._fd, len(parts))
        rng = random.Random(seed)
        self._names = parts
        self._processes = [
            self._start(part, Script(address, self._fd, len(parts), number, rng.randrange(1 << 32), verifies))
            for number, part in enumerate(parts)
        ]

    def _start(self, part: str, script: Script) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.integration.torture_parts", part, json.dumps(asdict(script))]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=[self._fd], env=environment(), text=True
        )

    def sums(self) -> dict[str, int]:
        return self._board.sums()

    def await_turns(self, each: int) -> None:
        """Until every part has had so many more: none is stuck, whatever became of the daemon."""
        wanted = self._board.rows[:, 0] + each
        self._await(lambda: bool((self._board.rows[:, 0] >= wanted).all()))

    def await_all(self, counters: Iterable[str]) -> None:
        """Until there has been something of each."""
        self._await(lambda: all(map(self.sums().get, counters)))

    def _await(self, so: Callable[[], bool]) -> None:
        turns = self._board.rows[:, 0].copy()
        turned = np.full(len(turns), time.monotonic())
        while not so():
            dead = [name for name, process in zip(self._names, self._processes, strict=True) if process.poll()]
            assert not dead, f"parts have died: {dead}"
            before, turns = turns, self._board.rows[:, 0].copy()
            turned[turns != before] = time.monotonic()
            stuck = [name for name, at in zip(self._names, turned, strict=True) if time.monotonic() > at + _END_S]
            assert not stuck, f"no turn of {stuck} within {_END_S:g} s: {turns}, {self.sums()}"
            time.sleep(_LOOK_S)

    def stop(self, restarts: int) -> Report:
        """Lets every part end what it is at."""
        self._board.stop()
        faults: list[str] = []
        for name, process in zip(self._names, self._processes, strict=True):
            said, _ = process.communicate(timeout=_END_S)
            assert process.returncode == 0, f"{name} ended with {process.returncode}"
            faults += [f"{name}: {fault}" for fault in json.loads(said)]
        return Report(self.sums(), restarts, time.monotonic() - self._began, tuple(faults))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        os.close(self._fd)

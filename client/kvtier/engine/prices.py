"""Prices of loading and of computing, learnt from an engine's loads and steps. All on the scheduler's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.engine.options import EngineOptions

TRIAL_BLOCKS: Final = 8
PAUSE_S: Final = 2.0
"""Time between trials of the disk."""
_SPREAD: Final = 0.01
"""Least relative variance of ``x`` from which a slope is learnt."""
_DECODE_TOKENS: Final = 16
_OUTLIER: Final = 2.0
"""A step that is slower by this factor counts as if it were not: another program may have had the processor. A step
that is faster by this factor ends a warm-up, whose steps no longer count."""
_MOST_STEPS: Final = 16


class Trend:
    """The line ``base + slope * x`` through samples, by least squares, with neither part below 0. ``kept``: factor on
    the weight of earlier samples."""

    def __init__(self, kept: float) -> None:
        self.base = self.slope = 0.0
        self._kept, self._sums = kept, [0.0] * 5

    def add(self, x: float, y: float) -> None:
        self._sums = [self._kept * old + new for old, new in zip(self._sums, (1.0, x, x * x, y, x * y), strict=True)]
        n, sx, sxx, sy, sxy = self._sums
        spread = n * sxx - sx * sx
        self.slope = max(0.0, n * sxy - sx * sy) / spread if spread > _SPREAD * n * sxx else 0.0
        self.base = (sy - self.slope * sx) / n
        if self.base < 0:
            self.base, self.slope = 0.0, sxy / sxx


class _UnderWay(NamedTuple):
    """A load. ``alone``: no step and no other load is in its way."""

    blocks: int
    on_disk: int
    began: float
    expected: float
    alone: bool


class Prices:
    """Expects how long loads and computing take. A load is free until the first load has taught its price."""

    def __init__(self, tokens: int, options: EngineOptions, clock: Callable[[], float] = time.monotonic) -> None:
        """``tokens``: of a block."""
        self._tokens, self._clock = tokens, clock
        self._set, self._most_s = options.recompute_seconds_per_block, options.load_timeout / 2
        # Seconds a block, by 1 / blocks: the slope is a load's fixed part. For blocks on disk, seconds besides.
        self._memory, self._disk = Trend(kept=0.5), Trend(kept=0.5)
        # Seconds a token, by the mean number of tokens before it; and of a step that computes next to nothing.
        self._computing, self._least_s = Trend(kept=0.8), 0.0
        self._loads: dict[int, _UnderWay] = {}
        # By number: begin, tokens, and the sum of the numbers of tokens before each token.
        self._steps: dict[int, tuple[float, int, float]] = {}
        self._number, self._new, self._context, self._ended = 0, 0, 0.0, 0.0
        self._trial_at = 0.0
        self._trials: Final[deque[tuple[float, float]]] = deque()

    @property
    def block_s(self) -> float:
        """Seconds to compute a block at the beginning of a prompt; 0 = not learnt yet, or every load is to be made."""
        return self._computing.base * self._tokens if self._set is None else self._set

    def worth(self, on_disk: NDArray[np.bool_], first: int) -> int:
        """Returns the number of blocks to load so that the prompt is computed soonest. ``on_disk``: for each stored
        block, whether only the disk has it; ``first``: tokens before these blocks."""
        while self._trials:
            self._disk.add(*self._trials.popleft())
        if not self.block_s or not len(on_disk):
            return len(on_disk)
        blocks, now = np.arange(1, len(on_disk) + 1), self._clock()
        tokens, slope = self._tokens * blocks, self._computing.slope if self._set is None else 0.0
        saved = self.block_s * blocks + slope * tokens * (first + tokens / 2)
        seconds = self._seconds(blocks, np.cumsum(on_disk))
        queue = sum(max(0.0, each.began + each.expected - now) for each in self._loads.values())
        gain = np.where(seconds <= self._most_s, saved - seconds - queue, 0.0)
        best = int(np.argmax(gain))
        return best + 1 if gain[best] > 0 else 0

    def trial_is_due(self, on_disk: int) -> bool:
        """Returns whether to try how fast the disk is now, after blocks were not worth a load: ``on_disk`` of them."""
        if (now := self._clock()) < self._trial_at:
            return False
        self._trial_at = now + PAUSE_S
        if not on_disk:
            self._memory = Trend(kept=0.5)  # the next load tells
        return on_disk > 0

    def tried(self, blocks: int, seconds: float) -> None:
        """Notes that the disk took ``seconds`` for some blocks. Any thread may call."""
        self._trials.append((1 / blocks, seconds / blocks))

    def begin_load(self, ticket: int, blocks: int, on_disk: int, *, sync: bool) -> None:
        alone, expected = not sync and not self._loads, self._seconds(blocks, on_disk)
        self._loads[ticket] = _UnderWay(blocks, on_disk, self._clock(), expected, alone)

    def end_load(self, ticket: int, seconds: float = 0.0, *, failed: bool = False) -> None:
        """``seconds``: of the copy; 0 = there was none."""
        load = self._loads.pop(ticket, None)
        if load is None or not seconds:
            return
        seconds = self._clock() - load.began if load.alone else seconds
        if load.on_disk and not (failed and seconds < load.expected):
            more = max(0.0, seconds - self._seconds(load.blocks, 0))
            self._disk.add(1 / load.on_disk, more / load.on_disk)
        elif not failed:
            self._memory.add(1 / load.blocks, seconds / load.blocks)

    def _seconds(self, blocks: Any, on_disk: Any) -> Any:
        """Expects the time of one load, or of several. ``on_disk``: the number of blocks there."""
        memory, disk = self._memory, self._disk
        return memory.base * blocks + memory.slope + disk.base * on_disk + disk.slope * (on_disk > 0)

    def plan(self, computed: int, new: int) -> None:
        """Notes that the next step computes tokens ``[computed, computed + new)`` of a request."""
        self._new += new
        self._context += new * (computed + new / 2)

    def begin_step(self, *, waits: bool) -> int:
        """Returns the number of the step. ``waits``: for loads, so that it teaches nothing."""
        self._number += 1
        if self._new and not waits:
            self._steps[self._number] = self._clock(), self._new, self._context
        self._steps.pop(self._number - _MOST_STEPS, None)
        self._new, self._context = 0, 0.0
        return self._number

    def end_step(self, number: int) -> None:
        """Notes that the engine has the output of a step. Steps end in order."""
        before, self._ended = self._ended, self._clock()
        began, tokens, context = self._steps.pop(number, (self._ended, 0, 0.0))
        seconds = self._ended - max(began, before)
        if 0 < tokens <= _DECODE_TOKENS:
            self._least_s = min(seconds, 1.05 * self._least_s or seconds)
        elif tokens and seconds > 2 * self._least_s:
            context, price = context / tokens, (seconds - self._least_s) / tokens
            expected = self._computing.base + self._computing.slope * context
            if price * _OUTLIER < expected:
                self._computing, expected = Trend(kept=0.8), 0.0
            self._computing.add(context, min(price, _OUTLIER * expected or price))

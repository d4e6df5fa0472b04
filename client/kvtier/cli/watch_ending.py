"""When a watch ends: after so many events, at a moment, at a gap, by a signal, or because nobody reads it any more."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, TextIO

from kvtier.cli.watch_moments import Instant, Moment
from kvtier.cli.watch_output import Output
from kvtier.errors import CursorCompacted, DaemonUnavailable, InvalidArgument
from kvtier.events import Event, WatchItem
from kvtier.types import Cursor
from kvtier.watch import Watch

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True, frozen=True)
class Bounds:
    """``limit``: of events shown. ``until``: the last moment shown. ``follow`` False: only what exists at the start."""

    limit: int | None = None
    until: Moment | None = None
    follow: bool = True

    @property
    def moment(self) -> bool:
        """Whether it ends at a moment, which can pass without an event that is shown."""
        return self.until is not None or not self.follow


class Ending:
    """Judges items in their order. Ids rise over all epochs, so the id alone says what comes before a cursor."""

    def __init__(self, watch_from: Callable[[Cursor | None], Watch], bounds: Bounds) -> None:
        """``watch_from``: a watch with heartbeats that begins there, None = now, of what the user may watch."""
        self._watch_from = watch_from
        self._left = bounds.limit
        self._until = bounds.until
        self._last: int | None = bounds.until.id if isinstance(bounds.until, Cursor) else None
        self._follow = bounds.follow

    async def begin(self) -> None:
        """Before the watch begins: what exists at the start is what exists now. Raises :class:`InvalidArgument` for an
        end in an epoch that there is not, or that it does not lie in."""
        if isinstance(self._until, Cursor) and self._until.epoch:
            await self._require_known(self._until)
        if not self._follow:
            await self._end_at_newest()

    def lies_beyond(self, item: WatchItem) -> bool:
        """Whether the item is past the end, and not to be shown."""
        if not isinstance(item, Event):
            return False
        too_late = isinstance(self._until, Instant) and item.time_ns > self._until.time_ns
        return too_late or (self._last is not None and item.event_id > self._last)

    async def reached_with(self, item: WatchItem, watch: Watch) -> bool:
        """Whether nothing is to be shown after this item."""
        if self._left is not None and isinstance(item, Event):
            self._left -= 1
            if not self._left:
                return True
        if isinstance(self._until, Instant) and self._last is None and time.time_ns() >= self._until.time_ns:
            # Whatever happens from now on is later, so the newest id there is ends it, even if it is filtered away.
            await self._end_at_newest()
        return self._last is not None and watch.cursor is not None and watch.cursor.id >= self._last

    async def _require_known(self, end: Cursor) -> None:
        """Of the present epoch, ids to come are as good as others."""
        async with self._watch_from(None) as watch:
            now = watch.cursor
        if now is None or (end.epoch == now.epoch and end.id >= now.id):
            return
        if end.epoch > now.epoch:
            raise InvalidArgument("until.epoch", end.epoch, f"at most {now.epoch}, the present epoch")
        try:
            async with self._watch_from(end) as watch:
                await anext(watch)
        except InvalidArgument as error:
            raise InvalidArgument(error.field.replace("since", "until"), error.value, error.limit) from error
        except CursorCompacted:
            return  # it has been, and nothing of it is left to be shown

    async def _end_at_newest(self) -> None:
        """Asks anew instead of taking what the watch says: its last batch may have been on the way for long."""
        try:
            async with self._watch_from(None) as watch:
                now = watch.cursor
        except DaemonUnavailable:
            return  # the watch waits for it; asked again with the next item
        if now is not None:
            self._last = now.id if self._last is None else min(self._last, now.id)


class Stopped(BaseException):
    """A signal came while a write waited for a reader that does not read."""


class Interrupts:
    """SIGINT and SIGTERM end the command's task; inside a write that hangs, and the second time, they end it at once.

    ``caught``: the first signal, 0 before.
    """

    def __init__(self, output: Output) -> None:
        self.caught = 0
        self._output = output
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """While it lasts. What the shell made this process ignore, it ignores: a background job's SIGINT, say."""
        heeded = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        before = [(each, signal.signal(each, self._handle)) for each in heeded]
        try:
            yield
        finally:
            for each, handler in before:
                signal.signal(each, handler)

    def end_this_task(self) -> None:
        """From now on a signal cancels the task that calls this."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.caught = bool(self.caught), self.caught or number
        if again or self._output.writing or self._loop is None or self._task is None:
            raise Stopped
        self._loop.call_soon_threadsafe(self._task.cancel)


def end_when_nobody_reads(stream: TextIO) -> None:
    """Cancels this task as soon as the other end of a pipe closes, not only at the next line."""
    if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
        return
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_reader(stream.fileno(), task.cancel)

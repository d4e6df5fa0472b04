"""A copy that two threads make, each some of it at a time, until there is none left to take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final


class Shared:
    """One thread makes the copy with :meth:`make`; another one takes from it with :meth:`help` when it gets a core. So
    nobody waits for a thread that has not begun, nor longer than for what that one has under way."""

    def __init__(self, copy: Callable[[int, int], None], count: int, over: Callable[[], None]) -> None:
        """``copy`` copies blocks from one number up to another, in either thread. ``over`` is called when all of them
        are copied, or the copy failed in one of the threads and the other one has ended, by the last to end; never
        where :meth:`make` raised."""
        self._copy: Final = copy
        self._count: Final = count
        self._over: Final = over
        self._lock: Final = threading.Lock()
        self._next = 0
        """The first block that nobody has taken."""
        self._made = False
        self._helping = False
        self._error: BaseException | None = None

    def make(self) -> None:
        """Half of what is left at a time, so that the last is small. Raises what the copy does."""
        try:
            while span := self._take(None, helps=False):
                self._copy(*span)
        except BaseException:
            self.leave()
            raise
        with self._lock:
            self._made = True
            over = not self._helping
        if over:
            self._over()

    def help(self, most: int | None) -> bool:
        """Copies so many blocks of what is left, or half of it; False: there was nothing. What the copy raises,
        :meth:`check` does."""
        span = self._take(most, helps=True)
        if span is None:
            return False
        error: BaseException | None = None
        try:
            self._copy(*span)
        except BaseException as raised:  # noqa: BLE001  it is raised where the copy is waited for
            error = raised
        with self._lock:
            self._helping = False
            if error is not None:
                self._error, self._next = error, self._count
            over = self._made
        if over:
            self._over()
        return True

    def check(self) -> None:
        """Raises what the copy raised in the thread that helps."""
        if self._error is not None:
            raise self._error

    @property
    def failed(self) -> bool:
        """Whether it did."""
        return self._error is not None

    def leave(self) -> bool:
        """No more is taken. Whether the thread that helps has some under way; if so and :meth:`make` has returned,
        ``over`` is still to be called."""
        with self._lock:
            self._next = self._count
            return self._helping

    def _take(self, most: int | None, *, helps: bool) -> tuple[int, int] | None:
        with self._lock:
            left = self._count - self._next
            if not left:
                return None
            start = self._next
            self._next += -(-left // 2) if most is None else min(most, left)
            if helps:
                self._helping = True
            return start, self._next

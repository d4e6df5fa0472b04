"""Half of a copy that two threads share, where the other one comes to it in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final


class Beside:
    """One thread makes its own half and calls :meth:`finish` then, another one calls :meth:`help` when it gets a core.
    Who of them takes the other half makes it, so that nobody waits for a thread that has not begun."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy: Final = copy
        self._lock: Final = threading.Lock()
        self._taken = False
        self._helps = False
        self._made: Final = threading.Lock()
        """Held until the helper has made it."""
        self._made.acquire()
        self._error: BaseException | None = None

    def help(self) -> None:
        """Makes the half, unless somebody has taken it."""
        if not self._take(helps=True):
            return
        try:
            self._copy()
        except BaseException as error:  # noqa: BLE001  it is raised where the half is waited for
            self._error = error
        finally:
            self._made.release()

    def finish(self) -> None:
        """Returns when the half is made, by whomever; raises what its copy raised."""
        if self._take(helps=False):
            self._copy()
            return
        self._made.acquire()
        if self._error is not None:
            raise self._error

    def leave(self) -> bool:
        """The half is not wanted any more. Whether it is being made, or was, by the helper, who is to be waited for."""
        return not self._take(helps=False) and self._helps

    def _take(self, *, helps: bool) -> bool:
        with self._lock:
            if self._taken:
                return False
            self._taken, self._helps = True, helps
            return True

"""Event ids, none of which a later life of the daemon gives out again."""

from __future__ import annotations

import logging
import threading

from kvtierd.core.events import EventSequencer
from kvtierd.core.ids import EventId
from kvtierd.state import StateDir

_log = logging.getLogger(__name__)


class DurableSequencer(EventSequencer):
    """Gives out ids up to the state directory's mark, which a thread moves ahead of need."""

    __slots__ = ("_state", "_try_at")

    def __init__(self, state: StateDir) -> None:
        super().__init__(state.identity.last)
        self._state = state
        self._try_at = 0

    def take(self) -> EventId:
        left = self._state.mark - self._last
        if left <= self._state.reserved_ids // 2 and self._last >= self._try_at:
            self._try_at = self._last + self._state.reserved_ids // 16  # a disk that refuses is not asked for every id
            threading.Thread(target=self._extend, name="kvtierd-ids", daemon=True).start()
        if left <= 0:
            # The thread was overtaken, or failed: an id above the mark must not leave, whatever this costs the loop.
            self._state.reserve(self._last + self._state.reserved_ids)
        return super().take()

    def _extend(self) -> None:
        try:
            self._state.reserve(self._state.mark + self._state.reserved_ids)
        except Exception:  # noqa: BLE001  the last resort in take() meets the same error where it can be raised
            _log.exception("cannot reserve event ids ahead")

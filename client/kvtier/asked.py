"""Chains that a client has asked for. A lookup and the read that follows it count as one question.

The daemon counts the chains of calls. Questions answered from shared memory reach it with the next touch.
"""

from __future__ import annotations

import threading
from typing import Final

from kvtier.abi.keys import KEY_BYTES

MOST_CHAINS: Final = 256
"""Number of last looked-up, not yet read chains that are remembered."""


class Asked:
    """The chains asked of one cache, as packed keys. Thread-safe."""

    def __init__(self) -> None:
        self.muted = False
        """Whether nothing counts: another process of the engine asks the same questions."""
        self._lock: Final = threading.Lock()
        self._found: Final[dict[bytes, tuple[bytes, int]]] = {}
        """Maps the last key of a chain to the chain and the number of its blocks that were found."""

    def looked_up(self, chain: bytes, found: int) -> bool:
        """Notes a lookup. Returns whether it is a new question: a repeated lookup with the same answer is not."""
        end = chain[-KEY_BYTES:]
        with self._lock:
            before = self._found.pop(end, None)
            self._found[end] = chain, found
            if len(self._found) > MOST_CHAINS:
                del self._found[next(iter(self._found))]
        return not self.muted and (before is None or before[1] != found)

    def read(self, chain: bytes) -> bool:
        """Notes a read. Returns whether it is a new question: no lookup of the chain, or of a longer chain that begins
        with it, came before. A read uses up its lookup; the next read is a question of its own."""
        with self._lock:
            if self.muted or self._found.pop(chain[-KEY_BYTES:], None) is not None:
                return False
            for end, (whole, _) in reversed(self._found.items()):
                if whole.startswith(chain):
                    del self._found[end]
                    return False
        return True

    def stored(self, chain: bytes) -> None:
        """Notes that the end of a chain was stored: the next lookup of it is a new question."""
        with self._lock:
            self._found.pop(chain[-KEY_BYTES:], None)

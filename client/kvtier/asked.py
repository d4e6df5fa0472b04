"""Chains that a client has asked for, each of which counts once: a lookup and the read that follows are one question.

The daemon counts what calls ask for. What is answered from shared memory it is told with the next touch.
"""

from __future__ import annotations

import threading
from typing import Final

from kvtier.abi.keys import KEY_BYTES

MOST_CHAINS: Final = 256
"""Chains that were looked up last, and not read since."""


class Asked:
    """Of one cache. Any thread may use it. Chains are packed keys."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._found: Final[dict[bytes, tuple[bytes, int]]] = {}
        """By the last key of a chain: the chain, and how many blocks of it were found."""

    def looked_up(self, chain: bytes, found: int) -> bool:
        """Whether that is a new question: not where a scheduler repeats it and the answer is the same."""
        end = chain[-KEY_BYTES:]
        with self._lock:
            before = self._found.pop(end, None)
            self._found[end] = chain, found
            if len(self._found) > MOST_CHAINS:
                del self._found[next(iter(self._found))]
        return before is None or before[1] != found

    def read(self, chain: bytes) -> bool:
        """Whether that is a new question: no lookup of the chain, or of one that begins so, came before. One read
        answers a lookup; the next is a question of its own."""
        with self._lock:
            if self._found.pop(chain[-KEY_BYTES:], None) is not None:
                return False
            for end, (whole, _) in reversed(self._found.items()):
                if whole.startswith(chain):
                    del self._found[end]
                    return False
        return True

    def stored(self, chain: bytes) -> None:
        """The end of a chain was stored: who looks it up now asks anew."""
        with self._lock:
            self._found.pop(chain[-KEY_BYTES:], None)

"""The states of sequences (Mamba, GDN, short convolutions) that a cache should keep.

A prompt returns to a chain at a stored state. A chain needs the state at its end, the state before it, for a prompt
that takes back the last turn, and the states at its branches. The states in between are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_MOST: Final = 1 << 16
_BRANCH: Final = 2


@dataclass(slots=True)
class _State:
    """``before``: key of the state before it on its chain; ``followers``: number of states right after it."""

    before: bytes | None
    followers: int = 0


class States:
    """The states that this engine has stored lately, by the key of their block."""

    def __init__(self) -> None:
        self._states: Final[OrderedDict[bytes, _State]] = OrderedDict()

    def add(self, key: bytes, before: bytes | None, *, branch: bool = False, passed: bool = False) -> bytes | None:
        """Notes a stored state. Returns the key of a state that no longer needs to be kept.

        Args:
            before: key of the state from which the tokens up to this state were computed.
            branch: other sequences leave the chain here.
            passed: ``before`` is a state within the same answer, at which no prompt has ended.
        """
        state = self._states.setdefault(key, _State(before, _BRANCH * branch))
        if len(self._states) > _MOST:
            self._states.popitem(last=False)
        last = self._states.get(before) if before is not None else None
        if last is None:
            return None
        if passed and not last.followers:
            state.before = last.before
            return self._pop(before)
        last.followers += 1
        older = self._states.get(last.before) if last.before is not None else None
        if older is None or older.followers >= _BRANCH or last.followers >= _BRANCH:
            return None
        passed_by, last.before = last.before, older.before
        return self._pop(passed_by)

    def _pop(self, key: bytes | None) -> bytes | None:
        if key is not None:
            self._states.pop(key, None)
        return key

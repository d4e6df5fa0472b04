"""The states of sequences (Mamba, GDN, short convolutions) that a cache should keep.

A prompt returns to a chain at a stored state. A chain needs the states at the ends of its last prompt and answer, the
state before this prompt, for a user who takes the last turn back, and the states at branches. Other states are
forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_MOST: Final = 1 << 16
_BRANCH: Final = 2


@dataclass(slots=True)
class _State:
    """``before``: key of the state before it on its chain. ``prompts``, ``answers``: number of prompts that went on
    from it, and of answers after it with a state of their own; ``answer``: key of the state of the last one."""

    before: bytes | None
    prompts: int = 0
    answers: int = 0
    answer: bytes | None = None

    @property
    def is_branch(self) -> bool:
        return self.prompts + self.answers >= _BRANCH


class States:
    """The states that this engine has stored lately, by the key of their block."""

    def __init__(self) -> None:
        self._states: Final[OrderedDict[bytes, _State]] = OrderedDict()

    def add_prompt(self, key: bytes, before: bytes | None, *, branch: bool) -> list[bytes]:
        """Notes a stored state of a prompt. Returns the keys of states that are no longer needed.

        Args:
            before: key of the state from which the prompt went on. ``branch``: other prompts leave this one here.
        """
        self._add(key, _State(before, _BRANCH * branch))
        last = self._find(before)
        if last is None:
            return []
        last.prompts += 1
        if last.prompts + last.answers == _BRANCH and last.answers:  # the chat goes on without the answer's first words
            dropped, last.answers = self._drop(last.answer), 0
        else:
            dropped = []
        while not last.is_branch and (older := self._find(last.before)) and not older.is_branch:
            dropped += self._drop(last.before)
            last.before = older.before
        return dropped

    def add_answer(self, key: bytes, prompt: bytes | None, passed: bytes | None) -> list[bytes]:
        """Like :meth:`add_prompt`, for a state of the answer to a prompt whose last state is ``prompt``; ``passed``:
        the state before it in the same answer."""
        self._add(key, _State(prompt))
        dropped, asked = self._drop(passed), self._find(prompt)
        if asked is not None:
            asked.answers += not dropped
            asked.answer = key
        return dropped

    def _add(self, key: bytes, state: _State) -> None:
        self._states.setdefault(key, state)
        if len(self._states) > _MOST:
            self._states.popitem(last=False)

    def _find(self, key: bytes | None) -> _State | None:
        return None if key is None else self._states.get(key)

    def _drop(self, key: bytes | None) -> list[bytes]:
        """Drops a state, unless chains go on from it in several ways."""
        state = self._find(key)
        if key is None or state is None or state.is_branch:
            return []
        del self._states[key]
        return [key]

"""A request of an engine: the keys of its blocks, which grow with its tokens, and its hints.

A hint never fails the request and never changes the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from kvtier.abi.keys import KEY_BYTES, KEY_DTYPE, PLAIN, ROOT_PARENT, Scope, root, token_array
from kvtier.abi.spec import InvalidArgument
from kvtier.errors import require_kind
from kvtier.retention import conversation_tag
from kvtier.verbs import MAX_HINTS, Hint
from kvtier.wire import Keys


class KeyChain:
    """Keys of a request's full blocks, in the order of the blocks, from the engine's own chained hashes. A hash of 32
    bytes is the key; the key of another hash is its SHA-256."""

    def __init__(self) -> None:
        self._keys: Final = bytearray()
        self.token_ids: Callable[[int, int], Sequence[int]] | None = None
        """Returns the request's token ids ``[first, last)``, if routers may have them."""

    def extend(self, more: Any) -> int:
        """Adds hashes. Returns the new number of blocks."""
        for each in more:
            self._keys.extend(each if len(each) == KEY_BYTES else hashlib.sha256(each).digest())
        return len(self)

    def __len__(self) -> int:
        return len(self._keys) // KEY_BYTES

    @property
    def packed(self) -> bytes:
        return bytes(self._keys)

    def span(self, first: int, last: int) -> bytes:
        """Returns the keys of blocks ``[first, last)``, packed."""
        return bytes(self._keys[first * KEY_BYTES : last * KEY_BYTES])

    def key(self, block: int) -> bytes:
        return self.span(block, block + 1)

    def pick(self, blocks: Sequence[int]) -> bytes:
        """Returns the keys of these blocks, packed."""
        if blocks and blocks[-1] - blocks[0] + 1 == len(blocks):
            return self.span(blocks[0], blocks[-1] + 1)
        return np.frombuffer(self._keys, KEY_DTYPE)[blocks].tobytes() if blocks else b""

    def parent(self, block: int) -> bytes:
        """Returns the key of the block's parent; zeros for the first block's parent."""
        return self.key(block - 1) if block else ROOT_PARENT


class TokenChain(KeyChain):
    """A chain with the keys of :func:`kvtier.chain_keys`."""

    def __init__(self, tokens_per_block: int, scope: Scope = PLAIN) -> None:
        super().__init__()
        if scope.multimodal:
            limit = "none: kvtier.chain_keys knows them, a growing chain not"
            raise InvalidArgument("scope.multimodal", "items", limit)
        self._last = root(scope)
        self._width: Final = tokens_per_block * 4
        self._rest = b""
        """Bytes of the tokens in the last block, which is not full yet."""

    def extend(self, more: Any) -> int:
        """Adds token ids, without hashing earlier ones again. Returns the new number of blocks."""
        tokens = self._rest + token_array(more).tobytes()
        full = len(tokens) - len(tokens) % self._width
        for start in range(0, full, self._width):
            self._last = hashlib.sha256(self._last + tokens[start : start + self._width]).digest()
            self._keys.extend(self._last)
        self._rest = tokens[full:]
        return len(self)


FIELD: Final = "kvtier"
"""Field of the request's transfer parameters: ``{"session": TAG, "hints": [{"action": ..., ...}]}``."""
ACTIONS: Final = ("retain", "pin", "prefetch", "demote", "end", "return")
MOST: Final = MAX_HINTS - 1
"""Largest number of hints of a request. The call has one more."""


@dataclass(slots=True, frozen=True)
class RequestHints:
    """A request's conversation and hints. ``outcomes``: an object per hint of the request, in order: its outcome, and
    the reason for a rejected one."""

    conversation: bytes = b""
    hints: tuple[Hint, ...] = ()
    outcomes: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, parameters: Mapping[str, Any] | None, actions: Sequence[Any] = (), session: object = None) -> Self:
        """Reads the hints of a request.

        Args:
            parameters: the request's transfer parameters.
            actions: of vLLM's ``kv_hints``, each with ``action_id``, ``action_type``, ``action_version``, ``payload``.
            session: the engine's own tag of the conversation.
        """
        ours = (parameters or {}).get(FIELD)
        ours = ours if isinstance(ours, Mapping) else {}
        found: list[Hint] = []
        outcomes: list[dict[str, Any]] = []
        try:
            tag = conversation_tag(ours.get("session") or session or b"")  # type: ignore[arg-type]
        except InvalidArgument as error:
            tag, outcomes = b"", [{"outcome": "rejected", "reason": str(error)}]
        listed = ours.get("hints")
        given = [*(listed if isinstance(listed, list | tuple) else ()), *actions]
        for number, each in enumerate(given[: MOST + 1]):
            named = {"action_id": each.action_id} if hasattr(each, "action_id") else {}
            try:
                if number == MOST:
                    raise InvalidArgument("hints", len(given), f"at most {MOST} a request")
                found.append(_hint(each))
                outcomes.append({**named, "action": found[-1].action, "outcome": "deferred"})
            except InvalidArgument as error:
                outcomes.append({**named, "outcome": "rejected", "reason": str(error)})
        return cls(tag, tuple(found), tuple(outcomes))

    def told(self, keys: Keys) -> list[Hint]:
        """The hints once the request's chain, of these keys, is stored. Without a conversation they are about it."""
        target = {"conversation": self.conversation} if self.conversation else {"keys": keys}
        own = [hint if hint.conversation else replace(hint, **target) for hint in self.hints]
        return [Hint("reached", self.conversation, keys), *own] if self.conversation else own

    @property
    def reply(self) -> dict[str, Any] | None:
        """The transfer parameters of the answer."""
        return {FIELD: {"hints": list(self.outcomes)}} if self.outcomes else None


def _hint(given: Any) -> Hint:
    """A hint of an object's fields, or of an action of vLLM's envelope. Raises :class:`InvalidArgument`."""
    if hasattr(given, "action_id"):
        require_kind("payload", given.payload, Mapping)
        require_kind("action_type", given.action_type, str)
        if given.action_version not in ("", "0", "1"):
            raise InvalidArgument("action_version", given.action_version, "1")
        given = {**given.payload, "action": given.action_type.lower()}
    hint = Hint.of(given)
    hint.message()
    if hint.action not in ACTIONS:
        raise InvalidArgument("action", hint.action, f"one of {', '.join(ACTIONS)}")
    return hint

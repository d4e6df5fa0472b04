"""The hints that come with an engine's request. A hint never fails the request and never changes the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from kvtier.abi.spec import InvalidArgument
from kvtier.errors import require_kind
from kvtier.retention import conversation_tag
from kvtier.verbs import MAX_HINTS, Hint
from kvtier.wire import Keys

FIELD: Final = "kvtier"
"""Field of the request's transfer parameters: ``{"session": TAG, "hints": [{"action": ..., ...}]}``."""
ACTIONS: Final = ("retain", "pin", "prefetch", "demote", "end", "return")
MOST: Final = MAX_HINTS - 1
"""Largest number of hints of a request. The call has one more."""
_VERSIONS: Final = ("", "0", "1")


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
        if given.action_version not in _VERSIONS:
            raise InvalidArgument("action_version", given.action_version, "1")
        given = {**given.payload, "action": given.action_type.lower()}
    hint = Hint.of(given)
    hint.message()
    if hint.action not in ACTIONS:
        raise InvalidArgument("action", hint.action, f"one of {', '.join(ACTIONS)}")
    return hint

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
        listed = ours.get("hints") or ()
        given: list[tuple[dict[str, Any], Any]] = [({}, each) for each in listed if isinstance(listed, Sequence)]
        given += [({"action_id": action.action_id}, _fields(action)) for action in actions]
        for number, (outcome, each) in enumerate(given[: MOST + 1]):
            try:
                if number == MOST:
                    raise InvalidArgument("hints", len(given), f"at most {MOST} a request")
                hint = Hint.of(each)
                hint.message()
                found.append(hint)
                outcomes.append({**outcome, "action": hint.action, "outcome": "deferred"})
            except (InvalidArgument, TypeError, ValueError) as error:
                outcomes.append({**outcome, "outcome": "rejected", "reason": str(error)})
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


def _fields(action: Any) -> dict[str, Any]:
    """The fields of a hint from an action of vLLM's envelope. Raises :class:`InvalidArgument`."""
    require_kind("payload", action.payload, Mapping)
    if action.action_version not in _VERSIONS:
        raise InvalidArgument("action_version", action.action_version, "1")
    return {**action.payload, "action": action.action_type.lower()}

"""Rights of clients on caches. A client has no right that no rule gives.

A rule of the configuration (``[[allow]]``) names users, groups or certificates, caches and verbs. Rules only add
rights. Root and the daemon's own user have every right on every cache without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError, from_json

EVERY_CACHE: Final = "*"
_DECISIONS: Final = 4096
"""Decisions that are remembered. A client that asks for unknown names costs time, not memory."""


class Right(StrEnum):
    """The rights that a rule's ``verbs`` may list."""

    READ = "read"
    """Look up, acquire and map blocks."""
    WRITE = "write"
    """Create the cache; store, move, pin and drop blocks; map its memory writable."""
    WATCH = "watch"
    """See the cache's events."""
    TOKENS = "tokens"
    """See token ids in events, if the cache keeps token ids."""
    ADMIN = "admin"
    """Statistics, leases, kicks, forced resets, removal."""


ALL_RIGHTS: Final = frozenset(Right)


@dataclass(slots=True, frozen=True)
class User:
    """A process of this host, as the kernel saw it at its connection. ``gids``: primary and supplementary."""

    uid: int
    gids: frozenset[int]

    def __str__(self) -> str:
        return f"uid {self.uid}" + (f" (gids {', '.join(map(str, sorted(self.gids)))})" if self.gids else "")


@dataclass(slots=True, frozen=True)
class Certificate:
    """A client that TLS has verified. ``names``: its certificate's common name and alternative names."""

    names: frozenset[str]

    def __str__(self) -> str:
        return f"certificate {', '.join(sorted(self.names))}"


@dataclass(slots=True, frozen=True)
class Anonymous:
    """A client over TCP without TLS: it is on this host, but its user is unknown."""

    def __str__(self) -> str:
        return "an anonymous client of the loopback interface"


Identity = User | Certificate | Anonymous
"""The client's identity, as proven by the transport."""


def _no_truth(value: object) -> object:
    """Refuses booleans: pydantic would take ``true`` for the id 1."""
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


UserId = Annotated[int, BeforeValidator(_no_truth), Field(ge=0, lt=2**32 - 1)]
"""Id of a user or a group. The largest 32-bit number is not an id."""

_Text = Annotated[str, Field(min_length=1, max_length=256)]


class AllowRule(BaseModel):
    """An ``[[allow]]`` table; as a flag or an element in the environment, a JSON object with the same keys.

    The rule is for clients named by ``uids``, ``gids``, ``subjects`` (the exact common name or an alternative name of a
    certificate) or ``anonymous`` (TCP without TLS). ``caches``: names, or shell patterns of names.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    uids: tuple[UserId, ...] = Field((), description="User ids.")
    gids: tuple[UserId, ...] = Field((), description="Group ids, primary or supplementary.")
    subjects: tuple[_Text, ...] = Field((), description="Common or alternative names of client certificates.")
    anonymous: bool = Field(False, description="TCP clients without TLS.")
    caches: tuple[_Text, ...] = Field(
        min_length=1, description="Names of caches, or shell patterns, for example `prod-*`."
    )
    verbs: tuple[Right, ...] = Field(min_length=1, description="Rights on these caches.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return from_json(value)
        except ValueError as error:
            raise PydanticCustomError("json", "must be a JSON object: {why}", {"why": str(error)}) from error

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        if not (self.uids or self.gids or self.subjects or self.anonymous):
            raise ValueError("names nobody: give uids, gids, subjects or anonymous")
        return self

    def names(self, who: Identity) -> bool:
        match who:
            case User(uid, gids):
                return uid in self.uids or not gids.isdisjoint(self.gids)
            case Certificate(names):
                return not names.isdisjoint(self.subjects)
            case Anonymous():
                return self.anonymous


OVERFLOW_UID: Final = 65534
"""The uid that the kernel shows for all users that the daemon's user namespace does not map: it identifies no user."""


class Rights:
    """Decides the rights of clients. ``owner_uid``: the daemon's own uid."""

    def __init__(self, rules: Iterable[AllowRule], owner_uid: int) -> None:
        self._rules: Final = tuple(rules)
        self._owners: Final = frozenset({0, owner_uid} - {OVERFLOW_UID})
        self.on: Final = lru_cache(_DECISIONS)(self._decide)
        """Returns a client's rights on the name of a cache, even if the cache does not exist."""

    def somewhere(self, who: Identity) -> frozenset[Right]:
        """Rights that the client has on at least one name."""
        return self._given(who, lambda rule: True)

    def everywhere(self, who: Identity) -> frozenset[Right]:
        """Rights that the client has on every present and future cache."""
        return self._given(who, lambda rule: EVERY_CACHE in rule.caches)

    def _decide(self, who: Identity, cache: str) -> frozenset[Right]:
        return self._given(who, lambda rule: any(fnmatchcase(cache, name) for name in rule.caches))

    def _given(self, who: Identity, covers: Callable[[AllowRule], bool]) -> frozenset[Right]:
        """The rights of the rules that name the client and cover the caches asked for; all rights for an owner."""
        if isinstance(who, User) and who.uid in self._owners:
            return ALL_RIGHTS
        rules = (rule for rule in self._rules if rule.names(who) and covers(rule))
        return frozenset(right for rule in rules for right in rule.verbs)

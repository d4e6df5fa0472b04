"""Settings of a connector, as an engine's configuration file holds them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from math import ceil
from typing import Any, Final, Literal, Self, TypeAlias

from kvtier.abi.spec import CacheSpec
from kvtier.errors import InvalidArgument, require_kind, require_within
from kvtier.types import Tier, WritePolicy

Share: TypeAlias = Fraction | int
_WRITE_POLICIES: Final = {str(policy): policy for policy in WritePolicy}
_NUMBERS: Final[Mapping[str, tuple[float, float]]] = {
    "min_blocks": (1, 1 << 20),
    "async_blocks": (0, 1 << 20),
    "reserve_blocks": (1, 1 << 16),
    "threads": (1, 64),
    "load_timeout": (0.01, 600.0),
    "pin_wait": (0, 60.0),
    "remote_wait": (0, 600.0),
    "explain_misses": (0, 1.0),
}
"""Least and most of each number. A number whose most is whole is whole."""
_OPTIONAL: Final[Mapping[str, tuple[float, float]]] = {
    "host_bytes": (1, 1 << 60),
    "disk_bytes": (1, 1 << 60),
    "recompute_seconds_per_block": (0, 3600.0),
}
"""Like ``_NUMBERS``, or None."""
_TEXTS: Final = ("address", "cache", "weights_version")
SILENCE_S: Final = 0.05
"""Seconds that an engine waits, once, for a silent daemon."""
_WORDS: Final[Mapping[str, tuple[object, ...]]] = {
    "on_error": ("continue", "fail"),
    "write_policy": tuple(_WRITE_POLICIES),
    "save_decode": (True, False),
    "events": (True, False),
    "pin": (True, False),
}


@dataclass(slots=True, frozen=True)
class EngineOptions:
    """Settings of an engine's connector. ``docs/engines.md`` explains them.

    ``address``: of the daemon; None = its default. ``cache``: first part of the cache's name; None = the model's name.
    ``min_blocks``: shorter hits are not loaded. ``async_blocks``: loads of this many blocks or more do not delay the
    step. ``recompute_seconds_per_block``: only shorter loads are worth their time; None = measured, 0 = all loads are.
    ``reserve_blocks``: slots reserved ahead in each group.
    ``remote_wait``: seconds that a request waits for a remote store; 0 = the store is not asked.
    ``explain_misses``: share of the requests with missing blocks whose reason is logged, at most once a second.
    ``weights_version``: identifies the model's weights in the cache's name, instead of a digest of their files.
    """

    address: str | None = None
    cache: str | None = None
    on_error: Literal["continue", "fail"] = "continue"
    host_bytes: int | None = None
    disk_bytes: int | None = None
    write_policy: str = "through"
    save_decode: bool = True
    min_blocks: int = 1
    async_blocks: int = 16
    reserve_blocks: int = 64
    threads: int = 1
    load_timeout: float = 2.0
    events: bool = False
    pin: bool = False
    pin_wait: float = 0.05
    remote_wait: float = 2.0
    recompute_seconds_per_block: float | None = None
    explain_misses: float = 0.0
    weights_version: str | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], known: Collection[str] = (), **defaults: Any) -> Self:
        """Makes options from the engine's settings. ``known``: names of the connector's settings; empty = all. Raises
        :class:`InvalidArgument` for an invalid or unknown one."""
        known = sorted(known or (each.name for each in fields(cls)))
        for name, value in settings.items():
            if name not in known:
                raise InvalidArgument(f"kvtier setting {name}", value, f"left out: settings are {', '.join(known)}")
        options = cls(**{**defaults, **settings})
        for name, (low, high) in _NUMBERS.items():
            require_within(f"kvtier setting {name}", getattr(options, name), low, high)
        for name, (low, high) in _OPTIONAL.items():
            if getattr(options, name) is not None:
                require_within(f"kvtier setting {name}", getattr(options, name), low, high)
        for name in _TEXTS:
            require_kind(f"kvtier setting {name}", getattr(options, name), str, type(None))
        for name, words in _WORDS.items():
            value = getattr(options, name)
            if not any(value is word or (isinstance(word, str) and value == word) for word in words):
                raise InvalidArgument(f"kvtier setting {name}", value, f"one of {', '.join(map(str, words))}")
        return options

    def require_room(self, spec: CacheSpec, share: Share = 1, *, host_blocks: int = 1) -> None:
        """Raises :class:`InvalidArgument` for a budget without room for a block of each window group, of the host tier
        for ``host_blocks``. ``share``: the cache's share of the budgets."""
        block = sum(map(spec.record_bytes, range(len(spec.groups))))
        for name, blocks in (("host_bytes", host_blocks), ("disk_bytes", 1)):
            nbytes, least = getattr(self, name), ceil(blocks * block / share)
            if nbytes is not None and nbytes < least:
                limit = f"at least {least}: {'a block' if blocks == 1 else f'{blocks} blocks'} of each group of layers"
                raise InvalidArgument(f"kvtier setting {name}", nbytes, limit)

    @property
    def policy(self) -> WritePolicy:
        return _WRITE_POLICIES[self.write_policy]

    @property
    def budgets(self) -> dict[Tier, int] | None:
        """Bytes by tier; None = the daemon's defaults."""
        asked = {Tier.HOST: self.host_bytes, Tier.DISK: self.disk_bytes}
        return {tier: nbytes for tier, nbytes in asked.items() if nbytes is not None} or None


_EVERY_S: Final = 60.0


class Complaints:
    """Counts incidents by reason, and logs faults, at most once a minute for each reason. Any thread may add."""

    def __init__(self, log: logging.Logger) -> None:
        self.counts: Final[Counter[str]] = Counter()
        self._log: Final = log
        self._lock: Final = threading.Lock()
        self._logged: dict[str, float] = {}

    def add(self, reason: str, detail: object = "") -> None:
        """Counts a fault, and logs it unless its reason was logged less than a minute ago."""
        with self._lock:
            self.counts[reason] += 1
            now = time.monotonic()
            if now - self._logged.get(reason, -_EVERY_S) < _EVERY_S:
                return
            self._logged[reason] = now
        self._log.warning("%s%s (%d so far)", reason, f": {detail}" if detail else "", self.counts[reason])

    def note(self, reason: str, count: int = 1) -> None:
        """Counts an incident that is no fault, without a log line."""
        with self._lock:
            self.counts[reason] += count

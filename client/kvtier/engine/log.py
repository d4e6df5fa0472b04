"""Log lines of the connectors: below the engine's own loggers, so that the engine's handlers and levels apply."""

from __future__ import annotations

import logging
from typing import Final

from kvtier.types import CacheInfo, size


class _Below(logging.Handler):
    """Passes records of kvtier's loggers to loggers below the engine's own: ``vllm.kvtier.engine``."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine: Final = engine

    def emit(self, record: logging.LogRecord) -> None:
        record.name = f"{self._engine}.{record.name}"
        log = logging.getLogger(record.name)
        if log.isEnabledFor(record.levelno):
            log.handle(record)


def below(engine: str) -> logging.Logger:
    """Returns the logger ``ENGINE.kvtier``, and sends all lines of this process's kvtier below it. Call it when the
    engine has configured its loggers."""
    log, own = logging.getLogger(f"{engine}.kvtier"), logging.getLogger("kvtier")
    if not any(isinstance(handler, _Below) for handler in own.handlers):
        own.addHandler(_Below(engine))
        own.propagate = False
    own.setLevel(log.getEffectiveLevel())
    return log


def opened(info: CacheInfo, address: str, weights: str) -> str:
    """Returns the line for an open cache. ``weights``: the source of their digest; empty = the cache has none."""
    sizes: dict[str, int] = {}
    for tier in [tier for group in info.groups for tier in group.tiers]:
        sizes[str(tier.tier)] = sizes.get(str(tier.tier), 0) + tier.slots * tier.slot_bytes
    tiers = "".join(f", {size(nbytes)} {tier}" for tier, nbytes in sizes.items())
    return f"kvtier: cache {info.name}{tiers}, daemon at {address}" + (f", weights by {weights}" if weights else "")

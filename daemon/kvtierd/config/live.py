"""The configuration of a running daemon: what it reads, and how a reload changes it.

A reload is whole or not at all: everything that may change does so in one step on the loop thread, and nothing does if
anything is wrong with the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from pydantic import ValidationError

from kvtierd.config.describe import is_live
from kvtierd.config.keys import KEYS, Config

Listener = Callable[[Config], None]

_log = logging.getLogger(__name__)


class LiveConfig:
    """:attr:`now` is to be read where a value is used, not kept; what has to act on a change asks to be told.

    Loop thread only.
    """

    def __init__(self, config: Config) -> None:
        self._now = config
        self._listeners: Final[list[Listener]] = []
        self.problems: tuple[str, ...] = ()
        """What the last reload could not do: for health, until a later one has no such trouble."""

    @property
    def now(self) -> Config:
        return self._now

    def on_change(self, listener: Listener) -> None:
        """``listener`` is called with the configuration after each change. It must not fail: values are valid."""
        self._listeners.append(listener)

    def reload(self, fresh: Config) -> None:
        """Takes over what may change while the daemon runs; the rest is refused by name."""
        changed = {name for name in KEYS if getattr(fresh, name) != getattr(self._now, name)}
        live = {name for name in changed if is_live(KEYS[name])}
        try:
            self._take_over(fresh, live)
        except ValidationError as error:
            self.refuse("; ".join(fault["msg"].removeprefix("Value error, ") for fault in error.errors()))
            return
        refused = sorted(changed - live)
        self.problems = tuple(f"configuration: {name} has changed; that takes a restart" for name in refused)
        for problem in self.problems:
            _log.warning("%s", problem)
        _log.info("configuration reloaded changed=%s refused=%s", ",".join(sorted(live)), ",".join(refused))

    def refuse(self, reason: str) -> None:
        """The sources could not be read, or say what must not be: everything stays as it is."""
        self.problems = tuple(f"configuration: not reloaded: {line}" for line in reason.splitlines())
        for problem in self.problems:
            _log.warning("%s", problem)

    def _take_over(self, fresh: Config, live: set[str]) -> None:
        """Raises ValidationError where live values do not go with those that have to stay."""
        if not live:
            return
        values = {name: getattr(fresh if name in live else self._now, name) for name in KEYS}
        self._now = Config(**values)
        for listener in self._listeners:
            listener(self._now)

"""Calls that go on if their caller is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvtierd.mover.executor import MoverError
from kvtierd.service.errors import CallRefused
from kvtierd.tiers.base import TierError

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Spawning(Protocol):
    """The owner of tasks. It waits for them before its end."""

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]: ...


S = TypeVar("S", bound=Spawning)


def to_the_end(
    work: Callable[Concatenate[S, str, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, str, P], Coroutine[Any, Any, T]]:
    """Has a call go on if its caller is cancelled. The log then tells of a failure."""

    @wraps(work)
    async def call(owner: S, name: str, /, *args: P.args, **others: P.kwargs) -> T:
        task = owner.spawn(work(owner, name, *args, **others), f"{work.__name__}-{name}")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_nobody_waits)
            raise

    return call


def _nobody_waits(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, CallRefused | TierError | MoverError):
        _log.error("a task without a caller failed by a bug: %s", task.get_name(), exc_info=error)
    elif error is not None:
        _log.warning("a task without a caller failed: %s: %s", task.get_name(), error)

"""What threads do with a session's slots, and who waits for it: leases and sessions that end meanwhile, and a stop."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from kvtierd.core.ids import CacheId, LeaseId, SessionId
from kvtierd.mover.executor import HolderId, SlotThreads
from kvtierd.mover.runtime import Unaccounted

SESSION: HolderId = SessionId(1)
LEASE: HolderId = (CacheId(1), LeaseId(7))
OTHER: HolderId = (CacheId(1), LeaseId(8))


class Work:
    """Waits to be let through; fails if it is to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go_on = threading.Event()
        self._error = error

    def __call__(self) -> str:
        assert self.go_on.wait(30)
        if self._error is not None:
            raise self._error
        return "done"


@pytest.fixture
async def doing() -> AsyncIterator[SlotThreads]:
    doing = SlotThreads(asyncio.get_running_loop())
    yield doing
    doing.close()


async def test_lease_and_session_end_after_the_last_thread(doing: SlotThreads) -> None:
    ended: list[str] = []
    first, second = Work(), Work()
    tasks = [asyncio.create_task(doing.run((SESSION, LEASE), work)) for work in (first, second)]
    await asyncio.sleep(0)
    assert not doing.after(LEASE, lambda: ended.append("lease"))
    assert not doing.after(SESSION, lambda: ended.append("session"))
    assert doing.after(OTHER, lambda: ended.append("other"))
    first.go_on.set()
    assert await tasks[0] == "done"
    assert ended == ["other"]
    second.go_on.set()
    assert await tasks[1] == "done"
    assert sorted(ended) == ["lease", "other", "session"]


@pytest.mark.parametrize("error", [None, OSError("broken")])
async def test_a_caller_that_goes_away_ends_nothing_early(doing: SlotThreads, error: Exception | None) -> None:
    work, ended = Work(error), list[str]()
    task = asyncio.create_task(doing.run((SESSION, LEASE), work))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert not doing.after(LEASE, lambda: ended.append("lease"))
    work.go_on.set()
    await doing.idle()
    assert ended == ["lease"]


async def test_what_may_never_end_is_waited_for_for_ever(doing: SlotThreads) -> None:
    work = Work(Unaccounted("nobody knows"))
    work.go_on.set()
    with pytest.raises(Unaccounted):
        await doing.run((SESSION, LEASE), work)
    assert not doing.after(SESSION, lambda: pytest.fail("its slots may still be written to"))
    await doing.idle()  # its thread is free

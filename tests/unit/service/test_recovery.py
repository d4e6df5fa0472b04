"""The roll of sessions, and who of it still lives."""

import asyncio
import os
import subprocess
import sys
from typing import Any, cast

import pytest

from kvtierd.core.ids import SessionId
from kvtierd.notify import Notifier, PassedFd
from kvtierd.rights import User
from kvtierd.service.peer import PeerProcess
from kvtierd.service.recovery import RECORD_BYTES, Keeper, KeptArena, Roll, RollEntry, open_roll, start_time_of
from kvtierd.service.sessions import Capacity, SessionRegistry

TOKEN, OTHER = "ab" * 16, "cd" * 16


def peer(pid: int) -> PeerProcess:
    return PeerProcess(pid, User(os.getuid(), frozenset()), os.pidfd_open(pid), "")


def adopted(roll: Roll) -> list[RollEntry]:
    again, entries = Roll.adopt(os.dup(roll.fd))
    again.close()
    return entries


def test_who_was_entered_is_found_again_until_struck() -> None:
    roll, own = Roll.create(), peer(os.getpid())
    roll.enter(TOKEN, SessionId(5), own)
    roll.enter(OTHER, SessionId(6), own)
    assert {(entry.token, entry.session, entry.pid) for entry in adopted(roll)} == {
        (TOKEN, 5, os.getpid()),
        (OTHER, 6, os.getpid()),
    }
    roll.strike(SessionId(5))
    assert [entry.session for entry in adopted(roll)] == [6]
    own.close()
    roll.close()


def test_a_torn_record_is_nobody() -> None:
    roll, own = Roll.create(), peer(os.getpid())
    roll.enter(TOKEN, SessionId(5), own)
    roll.enter(OTHER, SessionId(6), own)
    os.pwrite(roll.fd, b"torn", 8)
    assert [entry.session for entry in adopted(roll)] == [6]
    own.close()
    roll.close()


def test_a_process_is_told_from_a_later_one_with_its_pid() -> None:
    start = start_time_of(os.getpid())
    assert start is not None
    same = RollEntry(TOKEN, SessionId(1), start, os.getpid(), os.getuid()).peer()
    assert same is not None and same.pid == os.getpid()
    same.close()
    assert RollEntry(TOKEN, SessionId(1), start - 1, os.getpid(), os.getuid()).peer() is None


def test_a_process_that_is_gone_is_nobody() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = start_time_of(process.pid)
    assert start is not None
    process.communicate(b"\n")
    assert RollEntry(TOKEN, SessionId(1), start, process.pid, os.getuid()).peer() is None
    assert start_time_of(process.pid) is None


@pytest.mark.parametrize("roll", ["none", "foreign"])
def test_without_a_sound_roll_no_memory_is_adopted(roll: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would know who still writes into it."""
    passed = [PassedFd("arena/c/control", os.memfd_create("control"))]
    if roll == "foreign":
        passed.append(PassedFd("sessions", os.memfd_create("sessions")))
    keeper = Keeper(Notifier("@kvtier-nobody-listens"), passed)
    kept, entries = open_roll(keeper)
    assert kept is not None
    assert entries == []
    assert keeper.take("c") is None
    assert "a kept arena is let go" in caplog.text
    kept.close()


def test_descriptors_that_mean_nothing_are_let_go() -> None:
    names = ["arena/c/control", "arena/c/control", "arena//host", "arena/c/photos", "unknown", "sessions", "sessions"]
    passed = [PassedFd(name, os.memfd_create("x")) for name in names]
    keeper = Keeper(Notifier(None), passed)
    assert keeper.take("c") == KeptArena({"control": passed[0].fd}, None)
    assert keeper.sessions_fd == passed[5].fd
    for one in (passed[0], passed[5]):
        os.close(one.fd)
    for one in passed:
        with pytest.raises(OSError):
            os.fstat(one.fd)


def test_a_record_has_room_beside_its_neighbours() -> None:
    assert len(RollEntry(TOKEN, SessionId(2**63), 2**63, 2**31, 2**31).pack()) <= RECORD_BYTES


class Ended:
    """An engine that notes whose leases were ended."""

    def __init__(self) -> None:
        self.sessions: list[int] = []

    def orphan_session(self, session: SessionId) -> None: ...
    def reattach_session(self, session: SessionId) -> None: ...
    def session_leases(self, session: SessionId) -> int:
        return 1

    def end_session(self, session: SessionId) -> None:
        self.sessions.append(session)


async def test_who_gives_up_before_all_that_it_held_is_known_holds_nothing_afterwards() -> None:
    """Its caches may still be being read: their leases come when it has gone."""
    engine, start = Ended(), start_time_of(os.getpid())
    assert start is not None
    registry = SessionRegistry(cast("Any", engine), Capacity(8, 8))
    old = registry.restore([RollEntry(TOKEN, SessionId(5), start, os.getpid(), os.getuid())])
    assert old.live == {5}
    task = asyncio.create_task(asyncio.sleep(0))
    registry.give_up(TOKEN, registry.begin(peer(os.getpid()), task))
    assert engine.sessions == [5, old.keeper]
    registry.settle()
    assert engine.sessions == [5, old.keeper] * 2
    registry.close()
    await asyncio.wait([task])

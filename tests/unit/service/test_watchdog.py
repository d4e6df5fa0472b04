"""The watchdog's feed, on a loop that is blocked on purpose, and the corners of the notify protocol."""

import array
import asyncio
import os
import socket
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from kvtierd.notify import Notifier, passed_fds, watchdog_interval_s
from kvtierd.service.server import Watchdog

INTERVAL_S = 0.3


@pytest.fixture
def manager(short_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(short_dir / "notify"))
        sock.setblocking(False)
        yield sock


def heard(manager: socket.socket) -> list[bytes]:
    messages = []
    while True:
        try:
            messages.append(manager.recv(4096))
        except BlockingIOError:
            return messages


async def next_message(manager: socket.socket) -> bytes:
    async with asyncio.timeout(10):
        return await asyncio.get_running_loop().sock_recv(manager, 4096)


async def test_a_blocked_loop_does_not_feed(manager: socket.socket) -> None:
    watchdog = Watchdog(Notifier(manager.getsockname()), INTERVAL_S, lambda: 0.0)
    feeding = asyncio.create_task(watchdog.run())
    assert await next_message(manager) == b"WATCHDOG=1"
    assert await next_message(manager) == b"WATCHDOG=1"
    heard(manager)
    time.sleep(2 * INTERVAL_S)  # noqa: ASYNC251  that is the fault
    assert heard(manager) == []
    assert await next_message(manager) == b"WATCHDOG=1"
    feeding.cancel()


@pytest.mark.parametrize("stalled_s", [INTERVAL_S, inf])
async def test_a_thread_that_is_stuck_or_dead_stops_the_feed_until_it_goes_on(
    manager: socket.socket, stalled_s: float
) -> None:
    asked: list[float] = []
    answers = iter([0.0, stalled_s, stalled_s, 0.0])

    def stalled() -> float:
        asked.append(next(answers, 0.0))
        return asked[-1]

    feeding = asyncio.create_task(Watchdog(Notifier(manager.getsockname()), INTERVAL_S, stalled).run())
    await next_message(manager)
    await next_message(manager)
    assert asked == [0.0, stalled_s, stalled_s, 0.0]
    feeding.cancel()


def test_a_message_is_one_datagram_of_assignments_and_descriptors(manager: socket.socket) -> None:
    notifier = Notifier(manager.getsockname())
    notifier.ready("two\nlines")
    read, write = os.pipe()
    notifier.store("arena/c/control", write)
    notifier.forget("arena/c/control")
    assert manager.recv(4096) == b"READY=1\nSTATUS=two lines"
    data, ancillary, _, _ = manager.recvmsg(4096, socket.CMSG_SPACE(64))
    assert data == b"FDSTORE=1\nFDNAME=arena/c/control\nFDPOLL=0"
    (fd,) = array.array("i", ancillary[0][2])
    assert os.path.sameopenfile(fd, write)
    assert manager.recv(4096) == b"FDSTOREREMOVE=1\nFDNAME=arena/c/control"
    for each in (read, write, fd):
        os.close(each)


def test_a_name_in_the_abstract_namespace_is_understood() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0kvtier-test-{os.getpid()}")
        Notifier(f"@kvtier-test-{os.getpid()}").alive()
        assert sock.recv(100) == b"WATCHDOG=1"


def test_a_manager_that_is_gone_stops_nothing_and_is_logged_once(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier(str(short_dir / "nobody"))
    notifier.ready("serving")
    notifier.alive()
    assert [record.getMessage() for record in caplog.records] == [
        "the service manager cannot be told READY=1 error='ENOENT'"
    ]


def test_variables_are_taken_away_so_that_no_child_speaks_for_the_daemon() -> None:
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    assert Notifier.from_environment(environment).listens
    assert watchdog_interval_s(environment) == 2.0
    assert environment == {"HOME": "/"}
    assert not Notifier.from_environment(environment).listens
    assert watchdog_interval_s(environment) is None


def test_what_was_meant_for_another_process_is_not_ours_and_no_descriptors_have_no_names() -> None:
    assert watchdog_interval_s({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}) is None
    assert passed_fds({"LISTEN_FDS": "1", "LISTEN_PID": "1", "LISTEN_FDNAMES": "x"}) == ()
    assert passed_fds({"LISTEN_FDS": "0", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": ""}) == ()


def test_what_makes_no_sense_is_refused() -> None:
    for usec in ("0", "-1", "soon"):
        with pytest.raises(ValueError):
            watchdog_interval_s({"WATCHDOG_USEC": usec})
    with pytest.raises(ValueError, match="2 names for 1 descriptors"):
        passed_fds({"LISTEN_FDS": "1", "LISTEN_FDNAMES": "a:b"})

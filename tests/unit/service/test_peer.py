import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.service import peer

CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); "


@pytest.fixture
def listener(short_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(short_dir / "sock"))
        sock.listen()
        yield sock


def connected(listener: socket.socket, then: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that has connected and goes on with ``then``, and the listener's end."""
    command = [sys.executable, "-c", CONNECT + then, listener.getsockname()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    return process, listener.accept()[0]


@pytest.fixture(params=["kernel", "by pid"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own pidfd of the peer, and what stands in for it before Linux 6.5."""
    if request.param == "by pid":
        monkeypatch.setattr(peer, "_SO_PEERPIDFD", 9999)


@pytest.mark.usefixtures("way")
def test_a_peer_is_known_by_its_process_and_seen_to_end(listener: socket.socket) -> None:
    process, sock = connected(listener, "sys.stdin.read()")
    with process, sock:
        who = peer.identify(sock)
        assert (who.pid, who.uid) == (process.pid, os.getuid())
        assert who.command.startswith(f"{sys.executable} -c import socket")
        assert not who.is_gone()
        assert not os.get_inheritable(who.pidfd)
        process.kill()
        assert select.select([who.pidfd], [], [], 5)[0]
        assert who.is_gone()
        who.close()


@pytest.mark.usefixtures("way")
def test_a_peer_that_is_gone_is_not_taken_for_another(listener: socket.socket) -> None:
    process, sock = connected(listener, "s.close()")
    with sock:
        process.communicate()
        try:
            who = peer.identify(sock)
        except peer.AttachRefused:
            return
        assert who.is_gone(), "a kernel may still hand out the pidfd of a process that has ended"
        who.close()


def test_the_peer_is_who_connected_not_who_holds_the_socket_now(listener: socket.socket) -> None:
    process, sock = connected(listener, "import os; print(os.fork() and sys.exit() or sys.stdin.read())")
    with sock:
        process.wait(5)  # its child lives on, with the socket
        try:
            who = peer.identify(sock)
        except peer.AttachRefused:
            pass
        else:
            assert (who.pid, who.is_gone()) == (process.pid, True)
            who.close()
        process.communicate()

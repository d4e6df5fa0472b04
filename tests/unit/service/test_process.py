"""``kvtierd`` as a process whose standard output takes nothing."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.abi import attach
from kvtier.v1 import session_pb2
from tests import packets


@pytest.mark.parametrize("full", [False, True])
def test_a_daemon_runs_on_where_nobody_takes_its_line(short_dir: Path, full: bool) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    out = os.open("/dev/full", os.O_WRONLY) if full else writes
    command = [sys.executable, "-m", "kvtierd.main", "--runtime-dir", str(short_dir / "run")]
    command += ["--state-dir", str(short_dir / "state"), "--host-bytes", "1MiB"]
    with subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = next(line for line in process.stderr if "standard output takes nothing" in line)
        assert ("No space left" if full else "Broken pipe") in told
        assert welcome(short_dir / "run").pid == process.pid
        process.terminate()
        _, log = process.communicate(timeout=20)
    for fd in {out, writes}:
        os.close(fd)
    assert (process.returncode, "BrokenPipeError" in log) == (0, False)


def welcome(directory: Path) -> session_pb2.Welcome:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(attach.socket_path(directory, attach.ATTACH_SOCKET))
        sock.send(packets.hello())
        answer = packets.reply(sock.recv(attach.MAX_MESSAGE + 1))
    assert isinstance(answer, session_pb2.Welcome)
    return answer

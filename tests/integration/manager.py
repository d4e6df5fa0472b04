"""The service manager's side of sd_notify(3): a socket that hears what a daemon says."""

import array
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.integration.waiting import PATIENCE_S


@dataclass(slots=True, frozen=True)
class Message:
    """``at``: the monotonic clock when it was heard. ``fds``: the socket's, which closes them."""

    fields: Mapping[str, str]
    fds: tuple[int, ...]
    at: float

    @classmethod
    def parse(cls, data: bytes, fds: tuple[int, ...]) -> Self:
        pairs = (line.partition("=") for line in data.decode().splitlines())
        return cls({name: value for name, _, value in pairs}, fds, time.monotonic())


class NotifySocket:
    """Bound to a path; everything heard stays in :attr:`heard`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[Message] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(str(path))

    def close(self) -> None:
        self._socket.close()
        for message in self.heard:
            for fd in message.fds:
                os.close(fd)

    def hear(self, within: float) -> Message | None:
        """The next message; None if none comes in time."""
        self._socket.settimeout(max(within, 0.001))
        try:
            data, ancillary, _, _ = self._socket.recvmsg(65536, socket.CMSG_SPACE(4 * 253))
        except TimeoutError:
            return None
        fds = array.array("i")
        for _, _, packed in ancillary:
            fds.frombytes(packed)
        message = Message.parse(data, tuple(fds))
        self.heard.append(message)
        return message

    def wait_for(self, wanted: Callable[[Message], bool], within: float = PATIENCE_S) -> Message:
        end = time.monotonic() + within
        while (left := end - time.monotonic()) > 0:
            message = self.hear(left)
            if message is not None and wanted(message):
                return message
        raise AssertionError(f"not heard within {within:g} s; heard {[dict(m.fields) for m in self.heard]}")

    def wait_for_field(self, name: str, within: float = PATIENCE_S) -> Message:
        return self.wait_for(lambda message: name in message.fields, within)

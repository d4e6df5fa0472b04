"""Events over a line: a socket of their own beside gRPC, where the daemon is on this host.

To take a message from ``grpc.aio`` costs a watcher more than to take the events from the message. The line is a
shortcut and nothing else: where there is none to be had a watch goes by gRPC, and where it breaks, the watch goes on
from its cursor as from any break. The protocol stands in :mod:`kvtier.abi.attach`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from kvtier.abi import attach as protocol
from kvtier.errors import DaemonError
from kvtier.rpc_errors import failed_with
from kvtier.v1 import events_pb2


class EventLines:
    """Of one link, which has one at a time: other watches of its client go by gRPC meanwhile."""

    def __init__(self, connect: Callable[[], socket.socket | None], token: str) -> None:
        """``connect``: a connection to the daemon's attach socket, the line's own then; None where there is none."""
        self._connect: Final = connect
        self._token: Final = token
        self._refused = False
        self._line: EventLine | None = None

    @property
    def in_use(self) -> bool:
        return self._line is not None

    async def open(self, request: events_pb2.WatchRequest) -> EventLine | None:
        """A watch over a line, to be cancelled; None where there is no line for it."""
        packet = request.SerializeToString()
        if self._refused or self._line is not None or not 0 < len(packet) <= protocol.MAX_MESSAGE:
            return None
        sock = self._connect()
        if sock is None:
            self._refused = True
            return None
        line = self._line = EventLine(sock, self._gone)
        try:
            if await line.begin(self._token, packet):
                return line
        except BaseException:
            line.cancel()
            raise
        self._refused = True
        line.cancel()
        return None

    def close(self) -> None:
        """Ends the watch, if there is one, and lets none begin."""
        self._refused = True
        if self._line is not None:
            self._line.cancel()

    def _gone(self) -> None:
        self._line = None


class EventLine:
    """One watch, with what its reader needs of a call of ``grpc.aio``. Read by one task, and cancelled at last."""

    def __init__(self, sock: socket.socket, gone: Callable[[], None]) -> None:
        self._sock: Final = sock
        self._gone: Final = gone
        self._loop: Final = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self._listening = False
        self._waiter: asyncio.Future[bytes] | None = None

    async def begin(self, token: str, request: bytes) -> bool:
        """False where the daemon refuses the line, or knows of none."""
        try:
            self._sock.send(protocol.encode(protocol.Events(token)))
            self._sock.send(request)
            return isinstance(protocol.decode_opened(await self._packet()), protocol.Opened)
        except (OSError, protocol.AttachProtocolError):
            return False

    async def read(self) -> events_pb2.WatchBatch | None:
        """The next batch; None where the connection has ended. Raises as a call does that the daemon ends."""
        while True:
            packet = await self._packet()
            kind, piece = packet[:1], packet[1:]
            try:
                if kind == protocol.ENDED:
                    raise failed_with(piece)
                if kind == protocol.LAST:
                    whole, self._pieces = b"".join((*self._pieces, piece)), []
                    return events_pb2.WatchBatch.FromString(whole)
            except DecodeError as error:
                raise DaemonError("what came on a line for events is no batch", reason="BAD_ANSWER") from error
            if kind != protocol.MORE:
                return None
            self._pieces.append(piece)

    def cancel(self) -> None:
        """Ends the watch; who reads is told that it has ended. Cancelling twice is allowed."""
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._gone()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(b"")

    async def _packet(self) -> bytes:
        """Empty where the connection has ended."""
        try:
            return self._sock.recv(protocol.MAX_MESSAGE + 1)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return b""
        if not self._listening:
            self._loop.add_reader(self._sock, self._receive)
            self._listening = True
        self._waiter = self._loop.create_future()
        return await self._waiter

    def _receive(self) -> None:
        if self._waiter is None or self._waiter.done():
            # Who reads is busy: the kernel is not asked again before it has come back.
            self._loop.remove_reader(self._sock)
            self._listening = False
            return
        try:
            self._waiter.set_result(self._sock.recv(protocol.MAX_MESSAGE + 1))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._waiter.set_result(b"")

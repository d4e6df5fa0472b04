"""Lines for events: what a watcher on this host is sent, over a socket of its own instead of gRPC.

A gRPC message costs the loop more than all that is in it, and either side three threads that wake one another; a packet
is written by the loop and read by the watcher's, and that is all. A watch takes the way of a call all the same: may
they, what are they shown, how does it end. The protocol stands in ``kvtier.abi.attach``.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing, suppress
from typing import Final

from kvtier.abi import attach
from kvtierd.core.ids import SessionId
from kvtierd.service.calls import StreamAnswers
from kvtierd.service.errors import Translator
from kvtierd.service.open_calls import OpenCalls
from kvtierd.service.sessions import Session, session_ended

PIECE: Final = attach.MAX_MESSAGE - 1


class EventLines:
    """The open lines, one a session. Loop thread only."""

    def __init__(self, batches: StreamAnswers, translate: Translator, open_calls: OpenCalls) -> None:
        self._batches: Final = batches
        self._translate: Final = translate
        self._open_calls: Final = open_calls
        self._open: dict[SessionId, asyncio.Task[None]] = {}

    async def serve(self, sock: socket.socket, session: Session) -> None:
        """Until the watch ends, the client hangs up, or the session has a newer line: its client may have lost this one
        without our knowing. Cancelled when the session ends. ``sock``: non-blocking, of packets; stays the caller's.

        Raises OSError where the socket breaks, :class:`attach.AttachProtocolError` for a request that is too long.
        """
        loop, line = asyncio.get_running_loop(), asyncio.current_task()
        if line is None:
            raise RuntimeError("not inside a task")
        older = self._open.get(session.id)
        if older is not None:
            older.cancel()
        self._open[session.id] = line
        try:
            async with session.streaming():
                raw = await loop.sock_recv(sock, attach.MAX_MESSAGE + 1)
                if len(raw) > attach.MAX_MESSAGE:
                    raise attach.AttachProtocolError("TOO_LONG", f"a message has at most {attach.MAX_MESSAGE} bytes")
                if raw:
                    # It has nothing more to say: all that can come is its end.
                    loop.add_reader(sock, line.cancel)
                    await self._tell(sock, session, raw)
        except asyncio.CancelledError:
            if session.ended:
                with suppress(OSError):  # it is being hung up on anyway
                    sock.send(attach.ENDED + session_ended().status())
            raise
        finally:
            loop.remove_reader(sock)
            if self._open.get(session.id) is line:
                del self._open[session.id]

    async def _tell(self, sock: socket.socket, session: Session, raw: bytes) -> None:
        self._open_calls.begins()
        try:
            try:
                async with aclosing(self._batches(session, raw)) as batches:
                    async for batch in batches:
                        await _send(sock, batch)
                return
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
                status = self._translate(error).status()
            await _send_packet(sock, attach.ENDED, status)
        finally:
            self._open_calls.ends()


async def _send(sock: socket.socket, batch: bytes) -> None:
    """Returns once the kernel has all of it, which it takes as long as the client reads."""
    rest = memoryview(batch)
    while len(rest) > PIECE:
        await _send_packet(sock, attach.MORE, rest[:PIECE])
        rest = rest[PIECE:]
    await _send_packet(sock, attach.LAST, rest)


async def _send_packet(sock: socket.socket, kind: bytes, piece: bytes | memoryview) -> None:
    while True:
        try:
            sock.sendmsg((kind, piece))
            return
        except BlockingIOError:
            await _writable(sock)


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    writable: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, _wake, writable)
    try:
        await writable
    finally:
        loop.remove_writer(sock)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

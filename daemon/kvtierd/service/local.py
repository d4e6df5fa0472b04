"""Calls of a client of this host over its attach socket. ``kvtier.abi.calls`` has the protocol."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Final

from kvtier.abi import calls
from kvtier.abi.attach import MAX_MESSAGE, TRACE_METADATA_KEY, AttachProtocolError
from kvtierd.service.calls import Dispatcher, LocalCall
from kvtierd.service.sessions import ClientSession

TURN: Final = 16
"""Packets of a connection after which its reader waits for its turn."""


class Packets:
    """The packets of a connection, for a single reader. Its descriptor stays with the event loop between waits."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock: Final = sock
        self._loop: Final = asyncio.get_running_loop()
        self._waiter: asyncio.Future[bytes] | None = None
        self._watched = False

    async def next(self) -> bytes:
        """The next packet; empty at the end. The kernel closes descriptors that the peer sends. Raises OSError."""
        with suppress(BlockingIOError):
            return self._sock.recv(MAX_MESSAGE + 1)
        if not self._watched:
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._watched = True
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Gives the descriptor back. Call before the socket is closed; closing twice is allowed."""
        if self._watched:
            self._loop.remove_reader(self._sock.fileno())
            self._watched = False

    def _readable(self) -> None:
        """Receives in the callback, in order of arrival: a woken reader could receive after other connections."""
        if self._waiter is None:
            self.close()  # without a waiting reader the loop would call again and again
        elif not self._waiter.done():
            try:
                self._waiter.set_result(self._sock.recv(MAX_MESSAGE + 1))
            except BlockingIOError:
                pass
            except OSError as error:
                self._waiter.set_exception(error)


class LocalCalls:
    """The calls of a connection. While an answer waits for its reader, no call is taken or begun: a client that reads
    no answer fills its own socket, but not its user's number of open calls."""

    def __init__(self, sock: socket.socket, session: ClientSession, dispatcher: Dispatcher) -> None:
        self._sock: Final = sock
        self._session: Final = session
        self._dispatcher: Final = dispatcher
        self._open: Final[dict[int, asyncio.Task[None]]] = {}
        self._writing: Final = asyncio.Lock()
        self._taken = 0

    async def take(self, packet: bytes) -> None:
        """Begins a call, or cancels a call that its caller has given up. Raises :class:`AttachProtocolError`.

        Waiting packets are received in one turn of the loop: a call that was given up while the daemon was stopped does
        not begin.
        """
        async with self._writing:  # no other answer waits
            self._taken += 1
        request = calls.decode_request(packet)
        number = request.number
        if isinstance(request, calls.GiveUpPacket):
            if number in self._open:
                self._open[number].cancel()
            return
        if self._taken % TURN == 0:
            await asyncio.sleep(0)  # calls taken before go first
            await self._dispatcher.turns.begin(self._session)
        if number in self._open:
            raise AttachProtocolError("BAD_MESSAGE", f"call {number} is open already")
        metadata = ((TRACE_METADATA_KEY, request.trace.decode(errors="replace")),) if request.trace else ()
        call = LocalCall(self._session, request.path, request.request, metadata)
        task = asyncio.create_task(self._serve(number, call))
        self._open[number] = task
        task.add_done_callback(lambda _: self._open.pop(number))

    async def _serve(self, number: int, call: LocalCall) -> None:
        await self._dispatcher.turns.begin(self._session)
        async with self._writing:
            pass
        await self._dispatcher.local(call, lambda status, body: self._answer(number, status, body))

    async def end(self) -> None:
        """Cancels all calls, since the connection is over."""
        while self._open:
            for task in self._open.values():
                task.cancel()
            await asyncio.wait(self._open.values())

    async def _answer(self, number: int, status: int, body: bytes) -> None:
        packet = calls.encode_answer(number, status, body)
        with suppress(OSError):  # the peer has hung up; the reader of the connection notices it, too
            async with self._writing:
                await asyncio.get_running_loop().sock_sendall(self._sock, packet)

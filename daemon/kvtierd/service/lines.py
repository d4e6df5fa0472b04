"""Lines for commits: what a session stores, over a socket of its own instead of gRPC.

A gRPC call wakes six threads one after another, a message on a socket two; and a put waits for its commit. A message
takes the way of a call all the same: may they, was it answered already, how is it refused. A line remembers nothing:
what a client did not hear, it repeats by ``Blocks.Commit``. The protocol stands in ``kvtier.abi.attach``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import Message

from kvtier.abi import attach
from kvtier.v1 import blocks_pb2
from kvtierd.core.ids import SessionId
from kvtierd.service.errors import Translator
from kvtierd.service.sessions import Session

Answer = Callable[[Session, bytes], Message]
"""To one request, as it came; waits for nothing. Raises what refuses it."""


class CommitLines:
    """The open lines, one a session. Loop thread only."""

    def __init__(self, answer: Answer, translate: Translator, behind: Callable[[], bool]) -> None:
        """``behind``: what answers tell of could not be seen yet; the next turn of the loop does away with that."""
        self._answer: Final = answer
        self._translate: Final = translate
        self._behind: Final = behind
        self._open: dict[SessionId, _Line] = {}

    async def serve(self, sock: socket.socket, session: Session) -> None:
        """Until the client hangs up, or the session has a newer line: its client may have lost this one without our
        knowing. Cancelled when the session ends. ``sock``: non-blocking, of packets; stays the caller's.

        Raises OSError where the socket breaks, :class:`attach.AttachProtocolError` for a message that is too long.
        """
        line = _Line(sock, lambda raw: self._told(session, raw), self._behind)
        older = self._open.get(session.id)
        if older is not None:
            older.end()
        self._open[session.id] = line
        try:
            async with session.streaming():
                await line.serve()
        finally:
            if self._open.get(session.id) is line:
                del self._open[session.id]

    def _told(self, session: Session, raw: bytes) -> bytes:
        try:
            done: Any = self._answer(session, raw)
            told = blocks_pb2.CommitAnswer(done=done)
        except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
            told = blocks_pb2.CommitAnswer(refused=self._translate(error).status())
        return told.SerializeToString()


class _Line:
    """Answers each packet in the turn in which it is read, or in the next one, before another is read: one a turn.
    While an answer is not taken, none is read."""

    __slots__ = ("_answer", "_behind", "_ended", "_loop", "_sock", "_unsent")

    def __init__(self, sock: socket.socket, answer: Callable[[bytes], bytes], behind: Callable[[], bool]) -> None:
        self._sock: Final = sock
        self._answer: Final = answer
        self._behind: Final = behind
        self._loop: Final = asyncio.get_running_loop()
        self._ended: Final[asyncio.Future[None]] = self._loop.create_future()
        self._unsent = b""

    async def serve(self) -> None:
        self._loop.add_reader(self._sock, self._read)
        try:
            await self._ended
        finally:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)

    def end(self, error: Exception | None = None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _read(self) -> None:
        if self._ended.done():
            return
        try:
            raw = self._sock.recv(attach.MAX_MESSAGE + 1)
            if not raw:
                self.end()
            elif len(raw) > attach.MAX_MESSAGE:
                raise attach.AttachProtocolError("TOO_LONG", f"a message has at most {attach.MAX_MESSAGE} bytes")
            else:
                self._unsent = self._answer(raw)
                if self._behind():
                    self._loop.call_soon(self._write_next)
                else:
                    self._write()
        except (BlockingIOError, InterruptedError):
            pass  # nothing is there to be read after all
        except Exception as error:  # noqa: BLE001  raised where the connection is served
            self.end(error)

    def _write_next(self) -> None:
        if self._ended.done():
            return
        try:
            self._write()
        except Exception as error:  # noqa: BLE001  raised where the connection is served
            self.end(error)

    def _write(self) -> None:
        try:
            self._sock.send(self._unsent)
        except BlockingIOError:
            self._loop.remove_reader(self._sock)
            self._loop.add_writer(self._sock, self._write_later)
        else:
            self._unsent = b""

    def _write_later(self) -> None:
        try:
            self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(error)
            return
        self._unsent = b""
        self._loop.remove_writer(self._sock)
        if not self._ended.done():
            self._loop.add_reader(self._sock, self._read)

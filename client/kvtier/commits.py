"""Commits over a line: a socket of their own beside gRPC, where the daemon is on this host.

The line is a shortcut and nothing else: the number of a commit is what keeps it from being done twice. So whatever
befalls the line, the commits on it are repeated as unary calls, and those say what is wrong, if anything is. The
protocol stands in :mod:`kvtier.abi.attach`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import AioRpcError, Metadata

from kvtier.abi import attach as protocol
from kvtier.rpc_errors import failed_with
from kvtier.v1 import blocks_pb2, blocks_pb2_grpc

_Told = asyncio.Future[blocks_pb2.CommitAnswer | None]
"""None: the line ended before."""


@dataclass(slots=True, eq=False)
class _Call:
    packet: bytes
    told: _Told = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CommitLine:
    """Of one link, opened by its first commit. Once it has ended, or where there is none to be had, every commit is a
    unary call."""

    def __init__(
        self,
        connect: Callable[[], socket.socket | None],
        blocks: blocks_pb2_grpc.BlocksAsyncStub,
        token: str,
    ) -> None:
        """``connect``: a connection to the daemon's attach socket, the line's own then; None where there is none."""
        self._connect: Final = connect
        self._blocks: Final = blocks
        self._token: Final = token
        self._loop: Final = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._welcome = False
        self._ended = False
        self._unsent: deque[_Call] = deque()
        self._sent: deque[_Call] = deque()

    @property
    def open(self) -> bool:
        """Whether commits go over the line: one has, and it has not ended."""
        return self._welcome and not self._ended

    async def commit(self, request: blocks_pb2.CommitRequest, seconds: float) -> blocks_pb2.CommitResponse:
        """Answers and raises as ``stubs.blocks.Commit`` does. Several may run; they reach the daemon in order.

        Who is cancelled leaves the line as it is: the commit may be done all the same.
        """
        (answer,) = await self.commit_in_turn([request], seconds)
        return answer

    async def commit_in_turn(
        self,
        requests: Sequence[blocks_pb2.CommitRequest],
        seconds: float,
        may_go: Callable[[int], Awaitable[None]] | None = None,
    ) -> list[blocks_pb2.CommitResponse]:
        """Commits of which each takes for granted that those before it are done. None waits for another's answer, but
        for ``may_go``, which is awaited with the number, from 1 on, of each but the first."""
        until = self._loop.time() + seconds
        calls: list[_Call | None] = []
        for number, request in enumerate(requests):
            if number and may_go is not None:
                await may_go(number)
            # None overtakes one that the line does not take.
            calls.append(None if calls and calls[-1] is None else self._begin(request))
        # One after another, since those that the line did not bring through are repeated here.
        return [await self._end(request, call, until) for request, call in zip(requests, calls, strict=True)]

    def close(self) -> None:
        """Whoever waits for an answer goes on by unary calls."""
        self._ended = True
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._sock = None
        for call in (*self._sent, *self._unsent):
            if not call.told.done():
                call.told.set_result(None)
        self._sent.clear()
        self._unsent.clear()

    def _begin(self, request: blocks_pb2.CommitRequest) -> _Call | None:
        """None where it cannot go over the line."""
        packet = request.SerializeToString()
        if not 0 < len(packet) <= protocol.MAX_MESSAGE or not self._opened():
            return None
        call = _Call(packet)
        self._unsent.append(call)
        if len(self._unsent) == 1:
            self._send()
        return call

    def _opened(self) -> bool:
        if self._sock is None and not self._ended:
            self._sock = self._connect()
            if self._sock is None:
                self._ended = True
            else:
                self._loop.add_reader(self._sock, self._receive, self._sock)
                self._send_one(protocol.encode(protocol.Commits(self._token)))
        return not self._ended

    async def _end(
        self, request: blocks_pb2.CommitRequest, call: _Call | None, until: float
    ) -> blocks_pb2.CommitResponse:
        """The answer, asked for by a unary call where the line brings none."""
        answer = None
        if call is not None:
            try:
                async with asyncio.timeout_at(until):
                    answer = await call.told
            except TimeoutError:
                message = "the daemon has not answered on the line for commits"
                raise AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata(), message) from None
        if answer is None:
            left = max(0.0, until - self._loop.time())
            metadata = ((protocol.SESSION_METADATA_KEY, self._token),)
            return await self._blocks.Commit(request, timeout=left, metadata=metadata)
        if answer.WhichOneof("outcome") == "done":
            return answer.done
        raise failed_with(answer.refused)

    def _send(self) -> None:
        """As many as the daemon has room for; the others when it has."""
        while self._unsent:
            call = self._unsent[0]
            if not call.told.done():  # else its caller went away
                if not self._send_one(call.packet):
                    return
                self._sent.append(call)
            self._unsent.popleft()
        if self._sock is not None:
            self._loop.remove_writer(self._sock)

    def _send_one(self, packet: bytes) -> bool:
        """False where it is not sent."""
        if self._sock is None:
            return False
        try:
            self._sock.send(packet)
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._send)
            return False
        except OSError:  # why, the repeats will say
            self.close()
            return False
        return True

    def _receive(self, sock: socket.socket) -> None:
        try:
            packet = sock.recv(protocol.MAX_MESSAGE + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet = b""
        if not packet or not self._heard(packet):
            self.close()

    def _heard(self, packet: bytes) -> bool:
        """False for what is not part of the conversation, and where the line is refused."""
        try:
            if not self._welcome:
                self._welcome = isinstance(protocol.decode_opened(packet), protocol.Opened)
                return self._welcome
            answer = blocks_pb2.CommitAnswer.FromString(packet)
        except (protocol.AttachProtocolError, DecodeError):
            return False
        if not self._sent:
            return False
        call = self._sent.popleft()
        if not call.told.done():
            call.told.set_result(answer)
        return True

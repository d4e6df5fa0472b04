"""Commits over one stream that stays open: cheaper than a unary call each.

The stream is a shortcut and nothing else: the number of a commit is what keeps it from being done twice. So whatever
befalls the stream, the commits on it are repeated as unary calls, and those say what is wrong, if anything is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
from google.rpc import status_pb2
from grpc.aio import AioRpcError, Metadata

from kvtier.rpc_errors import DETAILS_KEY
from kvtier.v1 import blocks_pb2, blocks_pb2_grpc

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

_Told = asyncio.Future[blocks_pb2.CommitAnswer | None]
"""None: the stream ended before."""


@dataclass(slots=True, eq=False)
class _Call:
    request: blocks_pb2.CommitRequest
    told: _Told = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CommitStream:
    """Of one link, opened by its first commit. Once it has ended, or where the daemon has no such method, the link has
    none, and every commit is a unary call."""

    def __init__(self, blocks: blocks_pb2_grpc.BlocksAsyncStub, metadata: tuple[tuple[str, str], ...]) -> None:
        self._blocks: Final = blocks
        self._metadata: Final = metadata
        self._stream: Any = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._ended = False
        self._unsent: deque[_Call] = deque()
        self._sent: deque[_Call] = deque()
        self._more: Final = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether commits go over the stream: one has, and it has not ended."""
        return self._stream is not None and not self._ended

    async def commit(self, request: blocks_pb2.CommitRequest, seconds: float) -> blocks_pb2.CommitResponse:
        """Answers and raises as ``stubs.blocks.Commit`` does. Several may run; they reach the daemon in order.

        Who is cancelled leaves the stream as it is: the commit may be done all the same.
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
        until = asyncio.get_running_loop().time() + seconds
        calls: list[_Call | None] = []
        for number, request in enumerate(requests):
            if number and may_go is not None:
                await may_go(number)
            calls.append(None if self._ended else self._begin(request))
        # One after another, since those that the stream did not bring through are repeated here.
        return [await self._end(request, call, until) for request, call in zip(requests, calls, strict=True)]

    def close(self) -> None:
        """Whoever waits for an answer goes on by unary calls."""
        self._ended = True
        for task in self._tasks:
            task.cancel()
        if self._stream is not None:
            self._stream.cancel()
        for call in (*self._sent, *self._unsent):
            if not call.told.done():
                call.told.set_result(None)
        self._sent.clear()
        self._unsent.clear()

    def _begin(self, request: blocks_pb2.CommitRequest) -> _Call:
        if self._stream is None:
            self._stream = self._blocks.Commits(metadata=self._metadata)
            self._tasks = asyncio.create_task(self._send()), asyncio.create_task(self._receive())
        call = _Call(request)
        self._unsent.append(call)
        self._more.set()
        return call

    async def _end(
        self, request: blocks_pb2.CommitRequest, call: _Call | None, until: float
    ) -> blocks_pb2.CommitResponse:
        """The answer, asked for by a unary call where the stream brings none."""
        answer = None
        if call is not None:
            try:
                async with asyncio.timeout_at(until):
                    answer = await call.told
            except TimeoutError:
                message = "the daemon has not answered on the stream of commits"
                raise AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata(), message) from None
        if answer is None:
            left = max(0.0, until - asyncio.get_running_loop().time())
            return await self._blocks.Commit(request, timeout=left, metadata=self._metadata)
        if answer.WhichOneof("outcome") == "done":
            return answer.done
        status = status_pb2.Status.FromString(answer.refused)
        trailing = Metadata((DETAILS_KEY, answer.refused))
        raise AioRpcError(_CODES[status.code], Metadata(), trailing, status.message)

    async def _send(self) -> None:
        # Not by the callers: gRPC ends a stream where a write is cancelled, and takes one write at a time.
        async with self._to_its_end():
            while True:
                while self._unsent:
                    call = self._unsent.popleft()
                    if not call.told.done():  # else its caller went away
                        self._sent.append(call)
                        await self._stream.write(call.request)
                self._more.clear()
                await self._more.wait()

    async def _receive(self) -> None:
        async with self._to_its_end():
            while isinstance(answer := await self._stream.read(), blocks_pb2.CommitAnswer) and self._sent:
                call = self._sent.popleft()
                if not call.told.done():
                    call.told.set_result(answer)

    @asynccontextmanager
    async def _to_its_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        except (AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # why it ended, the repeats will say
        finally:
            self.close()

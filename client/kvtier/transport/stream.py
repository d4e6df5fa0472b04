"""The connection of a client on another host: a stream with heartbeats."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final, Self

import grpc
import grpc.aio

from kvtier.abi import attach as protocol
from kvtier.errors import FAILED_WRITE, CallerError, DaemonError, error_of, fault_of
from kvtier.transport.attached import SegmentFds
from kvtier.v1 import session_pb2, session_pb2_grpc

SILENT_BEATS: Final = 3
"""Number of missed heartbeats after which the daemon counts as gone."""

_BYE_S: Final = 2.0

_BROKEN: Final = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)
"""gRPC's errors on a stream that has ended."""


class StreamConnection:
    """Sends heartbeats and listens for the daemon's. Has the methods of :class:`AttachConnection`."""

    def __init__(self, call: Any, heartbeat_s: float) -> None:
        self._call = call
        self._heartbeat_s = heartbeat_s
        self.closed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._listen())]

    @classmethod
    async def open(
        cls, channel: grpc.aio.Channel, token: str | None, *, attempts: int = 8
    ) -> tuple[Self, session_pb2.Welcome]:
        """Says hello and waits for the welcome. Raises :class:`kvtier.errors.KvtierError`."""
        stub: Any = session_pb2_grpc.SessionsStub(channel)
        call = stub.Session()
        hello = session_pb2.Hello(version=protocol.VERSION, token=token or "")
        try:
            await call.write(session_pb2.SessionRequest(hello=hello))
            reply = await call.read()
        except grpc.aio.AioRpcError as error:
            fault = fault_of(error)
            if fault.message == FAILED_WRITE and attempts > 1:  # gRPC hides a refusal that arrives during the write
                return await cls.open(channel, token, attempts=attempts - 1)
            raise error_of(fault) from None
        except BaseException:
            call.cancel()
            raise
        if reply is grpc.aio.EOF or reply.WhichOneof("message") != "welcome":
            call.cancel()
            raise DaemonError("the daemon's answer to a hello is no welcome", reason="BAD_ANSWER")
        return cls(call, reply.welcome.heartbeat_ns / 1e9), reply.welcome

    async def map(self, cache_id: int, *, write: bool) -> SegmentFds:
        raise CallerError(f"cache {cache_id}: memory cannot be mapped over TCP", reason="CANNOT_MAP")

    def forget(self, token: str) -> None:
        """Does nothing: over TCP no memory is lent."""

    async def say_bye(self) -> None:
        if self.closed.is_set():
            return
        with suppress(TimeoutError, *_BROKEN):  # without a daemon there is no session to end
            async with asyncio.timeout(_BYE_S):
                await self._call.write(session_pb2.SessionRequest(bye=session_pb2.Bye()))
                await self.closed.wait()

    def close(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        for task in self._tasks:
            task.cancel()
        self._call.cancel()

    async def _beat(self) -> None:
        with suppress(*_BROKEN):
            while True:
                await asyncio.sleep(self._heartbeat_s)
                await self._call.write(session_pb2.SessionRequest(heartbeat=session_pb2.Heartbeat()))

    async def _listen(self) -> None:
        """Reads heartbeats until the stream ends, or is silent for too long."""
        try:
            while True:
                async with asyncio.timeout(SILENT_BEATS * self._heartbeat_s):
                    if await self._call.read() is grpc.aio.EOF:
                        return
        except (TimeoutError, *_BROKEN):
            return
        finally:
            self.close()

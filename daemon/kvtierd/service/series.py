"""Requests of a unary method that follow each other on one stream: ``Blocks.Commits``.

A message takes the way of a call of its own: who calls, may they now, was it answered already. All that it saves is
what gRPC does for a call. A stream remembers nothing: what a client did not hear, it repeats by whichever way it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvtier.v1 import blocks_pb2
from kvtierd.core.ids import SessionId
from kvtierd.service.caller import caller_of
from kvtierd.service.errors import CallRefused, Translator, refused, shutting_down
from kvtierd.service.sessions import Session, SessionRegistry, session_ended
from kvtierd.service.writes import Write

MAX_STREAMS: Final = 1024
"""At a time. Each is a call that stays open, and all calls of the daemon are 4096: who gets none makes calls."""

MAX_DRAINED: Final = 128
"""Messages of a refused stream that are read and thrown away before it is told."""

DRAIN_S: Final = 0.25
"""How long that may take."""

_Context = grpc.aio.ServicerContext[Any, Any]
Answer = Callable[[Session, bytes], Coroutine[Any, Any, Message]]
"""To one request, as it came. Raises what refuses it."""


class Series:
    """The open streams, one a session. Loop thread only."""

    def __init__(self, sessions: SessionRegistry, translate: Translator, behind: Callable[[], bool]) -> None:
        """``behind``: what answers tell of could not be seen yet; the next turn of the loop does away with that."""
        self._sessions: Final = sessions
        self._translate: Final = translate
        self._behind: Final = behind
        self._open: dict[SessionId, asyncio.Task[Any]] = {}
        self._stopping = False

    def stop(self) -> None:
        """Ends all, and every one that is opened from now on."""
        self._stopping = True
        for stream in self._open.values():
            stream.cancel()

    def of(self, answer: Answer) -> Callable[[AsyncIterator[bytes], _Context], Awaitable[None]]:
        """A handler. ``answer`` must not wait for anything."""

        async def call(messages: AsyncIterator[bytes], context: _Context) -> None:
            session: Session | None = None
            try:
                if self._stopping:
                    raise shutting_down()
                session = self._sessions.authenticate(context.invocation_metadata(), caller_of(context))
                async with session.streaming(), self._only_one(session):
                    async for raw in messages:
                        # Who sends without reading is not read either.
                        told = await self._told(answer, session, raw)
                        if self._behind():
                            await asyncio.sleep(0)
                        await _taken(context, told)
                return
            except asyncio.CancelledError:
                if session is None or context.cancelled():
                    raise  # the call itself was cancelled
                refusal = self._why_ended(session)
            except grpc.aio.InternalError:
                return  # the peer went away before it took an answer: there is nobody to be told anything
            except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
                refusal = self._translate(error)
                await _drain(messages)
            await context.abort(refusal.code, refusal.message, refusal.trailing_metadata())

        return call

    async def _told(self, answer: Answer, session: Session, raw: bytes) -> bytes:
        try:
            done: Any = await answer(session, raw)
            told = blocks_pb2.CommitAnswer(done=done)
        except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
            told = blocks_pb2.CommitAnswer(refused=self._translate(error).status())
        return told.SerializeToString()

    @asynccontextmanager
    async def _only_one(self, session: Session) -> AsyncGenerator[None, None]:
        """Around the running task. An older one is cancelled: its client may have lost it without our knowing."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not inside a task")
        older = self._open.get(session.id)
        if older is not None:
            older.cancel()
        elif len(self._open) >= MAX_STREAMS:
            message = f"{MAX_STREAMS} streams of commits are open; Commit does the same"
            raise refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS", message)
        self._open[session.id] = task
        try:
            yield
        finally:
            if self._open.get(session.id) is task:
                del self._open[session.id]

    def _why_ended(self, session: Session) -> CallRefused:
        if self._stopping:
            return shutting_down()
        if session.ended:
            return session_ended()
        return refused(grpc.StatusCode.ABORTED, "DISPLACED", "the session has opened another stream of commits")


async def _drain(messages: AsyncIterator[bytes]) -> None:
    """Takes what a refused sender has under way: gRPC clients that are told in the middle of a message see an internal
    error instead of the refusal."""
    coming = aiter(messages)
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            for _ in range(MAX_DRAINED):
                if await anext(coming, None) is None:
                    return


async def _taken(context: _Context, reply: bytes) -> None:
    """Ends when the peer has taken it, also where the task is cancelled: gRPC has no way to end a call while a write is
    pending."""
    writing = Write(context, reply)
    try:
        await writing.taken()
    except asyncio.CancelledError:
        if not context.cancelled():
            await writing.ended()
        raise
    finally:
        writing.abandon()

"""Calls without a session, open to every client: health, reflection, and streams before their hello."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvtierd.service.errors import CallRefused, Translator, bad_argument, parser, refused
from kvtierd.service.sessions import this_task

MAX_UNAUTHENTICATED: Final = 64
"""Most calls without a session that the daemon serves at a time."""
READ_S: Final = 5.0
"""Seconds within which a message must arrive whole."""

_Context = grpc.aio.ServicerContext[Any, Any]


class UnauthenticatedCalls:
    """Serves calls without a session, at most :data:`MAX_UNAUTHENTICATED`: the oldest call gives way. Loop thread
    only."""

    def __init__(self, translate: Translator) -> None:
        self._translate: Final = translate
        self._calls: dict[asyncio.Task[Any], None] = {}

    @asynccontextmanager
    async def admitted(self) -> AsyncGenerator[None, None]:
        """Counts the running task during the body. Raises RESOURCE_EXHAUSTED in the body if the task gives way."""
        task = this_task()
        if len(self._calls) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._calls))
            del self._calls[oldest]
            oldest.cancel()
        self._calls[task] = None
        try:
            yield
        except asyncio.CancelledError:
            if task in self._calls:
                raise  # the client cancelled the call, or the daemon stops
            task.uncancel()
            says = f"the daemon serves {MAX_UNAUTHENTICATED} calls without a session at a time, and others came"
            raise refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS", says) from None
        finally:
            self._calls.pop(task, None)

    def handler(self, name: str, service: str, servicer: object, names: Iterable[str]) -> grpc.GenericRpcHandler:
        """The methods ``names`` of gRPC's own servicer of ``service``, served under ``name``."""
        methods = Default().FindServiceByName(service).methods_by_name
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            each: grpc.stream_stream_rpc_method_handler(
                self._call(methods[each], getattr(servicer, each)),
                response_serializer=GetMessageClass(methods[each].output_type).SerializeToString,
            )
            for each in names
        }
        return grpc.method_handlers_generic_handler(name, handlers)

    def _call(self, method: MethodDescriptor, verb: Callable[..., Any]) -> Callable[[Any, _Context], Awaitable[None]]:
        async def call(_: object, context: _Context) -> None:
            try:
                async with self.admitted(), aclosing(_requests(method, context)) as requests:
                    if method.client_streaming:
                        async for reply in verb(requests, context):
                            await write(context, reply)
                        return
                    request = await anext(requests, None)
                    if request is None:
                        raise bad_argument("request", "nothing", f"a serialised {method.input_type.full_name}")
                    reply = await verb(request, _Writer(context))
                    if reply is not None:  # a servicer of a stream writes by itself
                        await write(context, reply)
                return
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
                refusal = self._translate(error)
            await abort(context, refusal)

        return call


async def abort(context: _Context, refusal: CallRefused) -> NoReturn:
    """Ends a call with a refusal. Raises CancelledError if the client has gone: gRPC would log a traceback."""
    try:
        await context.abort(refusal.code, refusal.message, refusal.trailing_metadata())
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def read(context: _Context) -> bytes | None:
    """The next message of a call; None at the end. Raises DEADLINE_EXCEEDED if it does not arrive whole in time."""
    try:
        async with asyncio.timeout(READ_S):
            raw: Any = await context.read()
    except TimeoutError:
        says = f"the request did not come whole within {READ_S:g} seconds"
        raise refused(grpc.StatusCode.DEADLINE_EXCEEDED, "STALLED", says) from None
    return None if raw is grpc.aio.EOF else raw


async def write(context: _Context, reply: Message) -> None:
    """Writes a message. A cancelled caller waits for the end of the write: gRPC cannot end a call during its first."""
    writing = asyncio.ensure_future(context.write(reply))
    writing.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.shield(writing)
    finally:
        await asyncio.wait([writing], timeout=READ_S)


@dataclass(slots=True, frozen=True)
class _Writer:
    """The part of a context that gRPC's servicer of health uses."""

    _context: _Context

    async def write(self, reply: Message) -> None:
        await write(self._context, reply)

    async def abort(self, code: grpc.StatusCode) -> None:
        await self._context.abort(code)


async def _requests(method: MethodDescriptor, context: _Context) -> AsyncGenerator[Message, None]:
    parse = parser(method)
    while (raw := await read(context)) is not None:
        yield parse(raw)

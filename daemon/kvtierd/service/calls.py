"""Every unary call of ``kvtier.v1`` passes through here: who calls, may they, has it been answered
already, how does it fail.

A verb is a coroutine from a session and a request to a reply; it refuses by raising. That a verb mutates follows from
its request having a ``seq`` field, so no verb can forget to be repeatable.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

import grpc
import grpc.aio
import xxhash
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from kvtierd.service.access import NEEDS, Access
from kvtierd.service.caller import caller_of
from kvtierd.service.errors import Translator, bad_argument, shutting_down
from kvtierd.service.sessions import Session, SessionRegistry, require_attached

Verb = Callable[[Session, Any], Awaitable[Message]]
StreamVerb = Callable[[Session, Any], AsyncGenerator[bytes, None]]
"""Yields serialised replies."""

_Context = grpc.aio.ServicerContext[Any, Any]


class Dispatcher:
    """Makes gRPC handlers of verbs."""

    def __init__(self, sessions: SessionRegistry, access: Access, translate: Translator) -> None:
        self._sessions: Final = sessions
        self._access: Final = access
        self._translate: Final = translate
        self._stopping = False

    def stop(self) -> None:
        """Every unary call is refused from now on: what is behind the verbs is being taken away."""
        self._stopping = True

    def handler(
        self,
        service: ServiceDescriptor,
        verbs: Mapping[str, Verb],
        streams: Mapping[str, StreamVerb] | None = None,
    ) -> grpc.GenericRpcHandler:
        """The methods of a service that have a verb; the others are UNIMPLEMENTED.

        Raises KeyError for a verb of no method, or of one that stands in no table of rights.
        """
        streams = streams or {}
        if not {*verbs, *streams} <= set(service.methods_by_name):
            raise KeyError(f"{service.full_name}: verbs do not match {sorted(service.methods_by_name)}")
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(service.methods_by_name[name], verb), response_serializer=_serialise
            )
            for name, verb in verbs.items()
        } | {
            name: grpc.unary_stream_rpc_method_handler(self._stream(service.methods_by_name[name], verb))
            for name, verb in streams.items()
        }
        return grpc.method_handlers_generic_handler(service.full_name, handlers)

    def _unary(self, method: MethodDescriptor, verb: Verb) -> Callable[[bytes, _Context], Awaitable[Message]]:
        parse = _parser(method)
        mutates = "seq" in method.input_type.fields_by_name
        needs = NEEDS[method.full_name]
        name = method.full_name.encode()

        async def call(raw: bytes, context: _Context) -> Message:
            try:
                if self._stopping:
                    raise shutting_down()
                session = self._sessions.authenticate(context.invocation_metadata(), caller_of(context))
                request = parse(raw)
                self._access.require(session, needs, request)
                if not mutates or not request.seq:
                    return await verb(session, request)
                digest = xxhash.xxh3_128_digest(name + raw)
                return await session.replies.answer(request.seq, digest, lambda: _run(verb, session, request))
            except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
                refusal = self._translate(error)
            await context.abort(refusal.code, refusal.message, refusal.trailing_metadata())

        return call

    def _stream(self, method: MethodDescriptor, verb: StreamVerb) -> Callable[[bytes, _Context], Awaitable[None]]:
        parse = _parser(method)
        needs = NEEDS[method.full_name]

        async def call(raw: bytes, context: _Context) -> None:
            try:
                session = self._sessions.authenticate(context.invocation_metadata(), caller_of(context))
                request = parse(raw)
                self._access.require(session, needs, request)
                async with aclosing(verb(session, request)) as replies:
                    async for reply in replies:
                        await context.write(reply)
                return
            except Exception as error:  # noqa: BLE001  translated, and logged where it is our bug
                refusal = self._translate(error)
            await context.abort(refusal.code, refusal.message, refusal.trailing_metadata())

        return call


async def _run(verb: Verb, session: Session, request: Any) -> Message:
    # The task starts a turn later than the call came in: its session may be gone by now, and must not get a lease.
    require_attached(session)
    return await verb(session, request)


def _parser(method: MethodDescriptor) -> Callable[[bytes], Any]:
    cls = message_factory.GetMessageClass(method.input_type)

    def parse(raw: bytes) -> Any:
        try:
            return cls.FromString(raw)
        except DecodeError as error:
            raise bad_argument("request", f"{len(raw)} bytes", f"a serialised {method.input_type.full_name}") from error

    return parse


def _serialise(message: Message) -> bytes:
    return message.SerializeToString()

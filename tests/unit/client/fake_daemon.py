"""A daemon with a script: real sockets and real gRPC, and answers that a test decides.

For what a healthy daemon never does just when a test needs it: losing an answer, disowning a session, falling silent.
"""

import array
import asyncio
import os
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from kvtier.abi import attach
from kvtier.abi.control import ArenaIdentity
from kvtier.abi.layout import DEVICE, ArenaLayout
from kvtier.abi.spec import CacheSpec
from kvtier.v1 import admin_pb2, blocks_pb2, caches_pb2, common_pb2, events_pb2, session_pb2, transfer_pb2
from kvtier.wire import spec_to_wire
from kvtierd.tiers.arena import Arena
from tests import packets

SPEC = CacheSpec.single("fake", "uint8", tokens_per_block=16, layers=1, kv_heads=1, head_size=64)
SLOTS = 8
BOOT = 1

_MODULES = (admin_pb2, blocks_pb2, caches_pb2, events_pb2, transfer_pb2)

Context = grpc.aio.ServicerContext[Any, Any]
Answer = Callable[[Any, Context], Any]


class FakeDaemon:
    """``answers`` by method name: a coroutine, or for Watch an async generator, from request and context to the reply.

    ``calls`` has every request by method name, of an upload its first.
    """

    def __init__(self, directory: Path) -> None:
        self.address = str(directory)
        self.answers: dict[str, Answer] = {"Open": self._open, "Release": _release}
        self.calls: defaultdict[str, list[Any]] = defaultdict(list)
        self.hellos: list[session_pb2.Hello] = []
        self.byes = 0
        self.known: set[str] = set()
        self.attach_replies: list[bytes] = []
        """Raw answers to the next attach messages, instead of the right ones."""
        self.silent = False
        """Attach messages are read and not answered."""
        self.mapped = session_pb2.MappedCache(fds=["control", "device"])
        """The message that comes with the two descriptors."""
        self._arena: Arena | None = None
        self._connections: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(attach.socket_path(self.address, attach.ATTACH_SOCKET))
        self._listener.listen()
        self._accepting = loop.create_task(self._accept())
        self._server = grpc.aio.server()
        for module in _MODULES:
            for service in module.DESCRIPTOR.services_by_name.values():
                handlers = {name: self._handler(method) for name, method in service.methods_by_name.items()}
                self._server.add_generic_rpc_handlers(
                    (grpc.method_handlers_generic_handler(service.full_name, handlers),)
                )
        self._server.add_insecure_port(f"unix:{attach.socket_path(self.address, attach.RPC_SOCKET)}")
        await self._server.start()

    async def stop(self) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        os.unlink(attach.socket_path(self.address, attach.ATTACH_SOCKET))
        self.hang_up()
        await self._server.stop(0)
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    @property
    def is_attached(self) -> bool:
        """A client has a connection open."""
        return bool(self._tasks)

    async def until(self, condition: Callable[[], object]) -> None:
        """Returns once a call or a hello has made the condition true."""
        async with asyncio.timeout(10):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def hang_up(self) -> None:
        """Breaks all attach connections."""
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.stop()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            connection.setblocking(False)
            self._connections.add(connection)
            task = loop.create_task(self._converse(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _converse(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(connection, attach.MAX_MESSAGE):
            if self.silent:
                continue
            request = session_pb2.SessionRequest.FromString(data)
            if request.HasField("give_up"):
                continue
            if request.HasField("call"):  # answers are a test's, and come over gRPC
                answer = session_pb2.CallAnswer(number=request.call.number, too_long=True)
                connection.send(packets.of_daemon(answer=answer))
                continue
            if self.attach_replies:
                connection.send(self.attach_replies.pop(0))
                continue
            if request.HasField("bye"):
                self.byes += 1
                self._news.set()
                return
            if request.HasField("hello"):
                self.hellos.append(request.hello)
                connection.send(self._welcome(request.hello))
                self._news.set()
            else:
                fds = [
                    self._memory().shared(write=True).fds["control"],
                    self._memory().shared(write=True).fds["device"],
                ]
                names = packets.of_daemon(mapped=self.mapped)
                sent = array.array("i", fds)
                with suppress(BrokenPipeError):  # who asked has hung up meanwhile
                    connection.sendmsg([names], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])

    def _welcome(self, hello: session_pb2.Hello) -> bytes:
        if hello.token and hello.token not in self.known:
            says = "no session has this token"
            return packets.of_daemon(failure=session_pb2.AttachFailure(reason="UNKNOWN_SESSION", message=says))
        token = hello.token or os.urandom(16).hex()
        self.known.add(token)
        numbers = {"session_id": len(self.known), "epoch": 1, "boot": BOOT, "pid": os.getpid(), "history": 71}
        return packets.of_daemon(welcome=session_pb2.Welcome(token=token, resumed=bool(hello.token), **numbers))

    def _memory(self) -> Arena:
        if self._arena is None:
            layout = ArenaLayout.plan(SPEC, {(0, DEVICE): SLOTS})
            identity = ArenaIdentity(SPEC.fingerprint(), epoch=1, boot=BOOT, pid=os.getpid())
            self._arena = Arena.create("fake", layout, identity)
        return self._arena

    def _handler(self, method: MethodDescriptor) -> Any:
        parse = message_factory.GetMessageClass(method.input_type).FromString

        def note(request: Message, context: Context) -> Answer:
            self.calls[method.name].append(request)
            self._news.set()
            return self.answers[method.name]

        async def unary(request: Message, context: Context) -> Any:
            return await note(request, context)(request, context)

        async def stream(request: Message, context: Context) -> AsyncIterator[Any]:
            async for reply in note(request, context)(request, context):
                yield reply

        async def upload(requests: AsyncIterator[Message], context: Context) -> Any:
            first = await anext(aiter(requests))
            return await note(first, context)(first, context)

        serialise = lambda message: message.SerializeToString()  # noqa: E731
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(upload, parse, serialise)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, parse, serialise)
        return grpc.unary_unary_rpc_method_handler(unary, parse, serialise)

    async def _open(self, request: caches_pb2.OpenRequest, context: Context) -> caches_pb2.OpenResponse:
        tiers = [caches_pb2.GroupTierInfo(tier=common_pb2.TIER_DEVICE, slots=SLOTS, slot_bytes=4096)]
        info = caches_pb2.CacheInfo(
            cache_id=7,
            name=request.name,
            spec=spec_to_wire(SPEC),
            fingerprint=SPEC.fingerprint(),
            groups=[caches_pb2.GroupInfo(tiers=tiers)],
        )
        return caches_pb2.OpenResponse(cache_id=7, created=True, info=info)


async def _release(request: blocks_pb2.ReleaseRequest, context: Context) -> blocks_pb2.ReleaseResponse:
    return blocks_pb2.ReleaseResponse()


def play(daemon: FakeDaemon, *scripts: Sequence[Any]) -> None:
    """Each Watch call plays the next script: batches, events of asyncio to wait for, then a status, with or without
    metadata, or None to stay silent."""
    left = list(scripts)

    async def watch(request: events_pb2.WatchRequest, context: Context) -> AsyncIterator[events_pb2.WatchBatch]:
        for step in left.pop(0):
            match step:
                case None:
                    await asyncio.Event().wait()
                case asyncio.Event():
                    await step.wait()
                case grpc.StatusCode():
                    await context.abort(step, "as scripted")
                case (code, metadata):
                    await context.abort(code, "as scripted", metadata)
                case _:
                    yield step

    daemon.answers["Watch"] = watch


def failing(times: int, code: grpc.StatusCode, then: Answer) -> Answer:
    """Fails the first ``times`` calls of a method."""
    failed: Counter[str] = Counter()

    async def answer(request: Any, context: Context) -> Any:
        failed["calls"] += 1
        if failed["calls"] <= times:
            await context.abort(code, "as scripted")
        return await then(request, context)

    return answer

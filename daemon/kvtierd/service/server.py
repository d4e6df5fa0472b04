"""The gRPC server: kvtier's services, health and reflection on a private unix socket and, if asked for, a TCP port."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import grpc.aio
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection

from kvtier.abi.attach import ATTACH_SOCKET, RPC_SOCKET, AddressError, socket_path
from kvtierd.mover.engine import Engine
from kvtierd.notify import Notifier
from kvtierd.service.cache import ServedCache
from kvtierd.service.calls import MAX_CALLS
from kvtierd.service.catalog import Catalog
from kvtierd.service.sessions import SessionRegistry
from kvtierd.service.unauthenticated import UnauthenticatedCalls
from kvtierd.tcp import TcpListener
from kvtierd.tiers.base import TierConfigError
from kvtierd.tiers.disk.superblock import DirectoryLock, io_errors

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Size of the largest request, a commit of 1,024 blocks; clients split larger commits. The 16 KiB per block hold its
keys, hashes and checksum, and 1,024 token ids with their extra ids."""
REFLECTION_SERVICES: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""Both have the same messages on the wire; grpcio has generated code for the last."""
MAX_STREAMS: Final = 1024
"""Most calls of a connection at a time; gRPC's client has further calls wait."""

_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),
    # A client may ping a connection without open calls, but not flood it.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class RpcServer:
    """The server. Make, start and stop it on the loop that runs the verbs."""

    def __init__(self, handlers: Mapping[str, grpc.GenericRpcHandler], unauthenticated: UnauthenticatedCalls) -> None:
        """``handlers``: of each service, by its full name. Health and reflection need no session."""
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._health = health.HealthServicer()
        self._served: Final = list(handlers)
        _describe_reflection()
        shown = reflection.ReflectionServicer([*self._served, HEALTH_SERVICE, *REFLECTION_SERVICES])
        open_services = (
            unauthenticated.handler(HEALTH_SERVICE, HEALTH_SERVICE, self._health, ("Check", "Watch")),
            *(
                unauthenticated.handler(name, REFLECTION_SERVICES[-1], shown, ("ServerReflectionInfo",))
                for name in REFLECTION_SERVICES
            ),
        )
        self._server.add_generic_rpc_handlers((*handlers.values(), *open_services))

    def bind(self, path: str) -> None:
        """Listens on a unix socket. Raises RuntimeError if the socket cannot be made."""
        self._server.add_insecure_port(f"unix:{path}")

    def listen(self, listener: TcpListener) -> int:
        """Listens on TCP. Returns the port. Raises :class:`TierConfigError` for unusable TLS files, RuntimeError if it
        cannot listen."""
        credentials = listener.credentials()
        if credentials is None:
            return self._server.add_insecure_port(listener.target)
        return self._server.add_secure_port(listener.target, credentials)

    async def start(self) -> None:
        await self._server.start()
        for name in ("", *self._served):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def announce_stop(self) -> None:
        """Makes health answer NOT_SERVING from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls. Open calls get ``grace_s`` seconds to end; an open watch takes them all."""
        await self._server.stop(grace_s)


def _describe_reflection() -> None:
    """Adds version 1 to the services of reflection: grpcio's v1alpha under another package name."""
    old = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(old)
    new = text_format.Parse(text_format.MessageToString(old).replace("v1alpha", "v1"), FileDescriptorProto())
    Default().AddSerializedFile(new.SerializeToString())


OLD_LEASE_S: Final = 3600
"""Age from which health names a lease. An engine's request takes seconds, so an older lease is probably forgotten."""


@dataclass(slots=True, frozen=True, eq=False)
class Health:
    """``_others``: returns the problems of parts that serve no single cache."""

    _engine: Engine
    _catalog: Catalog
    _sessions: SessionRegistry
    _others: Callable[[], Iterable[str]]

    def problems(self, caches: Sequence[ServedCache]) -> list[str]:
        """Problems of the daemon and of these caches."""
        of_caches = [f"cache {cache.name}: {problem}" for cache in caches for problem in self._of(cache)]
        return [*self._others(), *self._catalog.problems(), *self._engine.problems(), *of_caches]

    def _of(self, cache: ServedCache) -> Iterator[str]:
        manager, now = self._engine.manager(cache.id), time.time_ns()
        for (src, dst), record in sorted(manager.stats().edges.items()):
            if (left := (record.degraded_until - now) / 1e9) > 0:
                why = f"{record.failures} blocks could not be moved; next try in {left:.1f} s"
                yield f"{src}>{dst} is not in use: {why}"
        if cache.runtime.cuda is not None and (why_slow := cache.runtime.cuda.locks.problem) is not None:
            yield f"copies to and from the GPU are slower than they could be: {why_slow}"
        for lease in manager.leases.values():
            if (age_s := (now - lease.granted_at) // 10**9) >= OLD_LEASE_S:
                pid, command = self._sessions.owner_of(lease.session)
                owner = f"session {lease.session}, pid {pid} {command}"
                yield f"{lease.slots} {lease.tier} slots are leased since {age_s} s by {owner}"


LOCK: Final = "kvtierd.lock"
_DIRECTORY_MODE: Final = 0o750
_SOCKET_UMASK: Final = 0o117
"""Sockets are created with mode 0660, so that other users can never connect."""


class RuntimeDir:
    """The runtime directory, held by this process alone. The lock comes before the sockets: a bind would silently
    replace a live daemon's socket."""

    def __init__(self, path: Path, lock: DirectoryLock, rpc_path: str, attach_path: str) -> None:
        self.path: Final = Path(os.path.abspath(path))
        self.rpc_path: Final = rpc_path
        self.attach_path: Final = attach_path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> Self:
        """Creates the directory (0750) if it is missing, and removes sockets that a crash left. Raises TierConfigError
        for a path too long for a socket, LockedDirectory, TierIOError."""
        try:
            rpc_path, attach_path = socket_path(path, RPC_SOCKET), socket_path(path, ATTACH_SOCKET)
        except AddressError as error:
            raise TierConfigError("runtime_dir", path, str(error)) from error
        with io_errors(f"cannot use the runtime directory {path}"):
            for missing in reversed([each for each in (path, *path.parents) if not each.is_dir()]):
                missing.mkdir(exist_ok=True)
                missing.chmod(_DIRECTORY_MODE)  # users of the sockets must pass the directories above, too
            lock = DirectoryLock.take(path / LOCK)
        runtime_dir = cls(path, lock, rpc_path, attach_path)
        runtime_dir._remove_sockets()
        return runtime_dir

    @contextmanager
    def creating_sockets(self) -> Iterator[None]:
        """Sets the mode of sockets bound in the body. The umask is the process's: be short, and start no threads."""
        before = os.umask(_SOCKET_UMASK)
        try:
            yield
        finally:
            os.umask(before)

    def bind_attach(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.bind(self.attach_path)
        except OSError:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """Removes the sockets and releases the directory."""
        self._remove_sockets()
        self._lock.release()

    def _remove_sockets(self) -> None:
        for path in (self.rpc_path, self.attach_path):
            Path(path).unlink(missing_ok=True)


_FEEDS_PER_INTERVAL: Final = 3
_STALLED_SHARE: Final = 0.5
"""Share of the interval that a thread may be in a call. The manager acts after another interval at most."""

_log = logging.getLogger(__name__)


class Watchdog:
    """Feeds the manager's watchdog. ``stalled_s``: returns the seconds that the mover's slowest thread has been in its
    call; infinite if a thread has died."""

    def __init__(self, notifier: Notifier, interval_s: float, stalled_s: Callable[[], float]) -> None:
        self._notifier: Final = notifier
        self._interval_s: Final = interval_s
        self._stalled_s: Final = stalled_s
        self._fed = True

    async def run(self) -> None:
        """Feeds the watchdog until cancelled."""
        while True:
            self._feed()
            await asyncio.sleep(self._interval_s / _FEEDS_PER_INTERVAL)

    def _feed(self) -> None:
        stalled_s = self._stalled_s()
        fresh = stalled_s <= self._interval_s * _STALLED_SHARE
        if fresh:
            self._notifier.alive()
        elif self._fed:
            _log.warning("the watchdog is not fed any more: a mover's thread is stuck seconds=%.1f", stalled_s)
        self._fed = fresh

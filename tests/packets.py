"""The messages of the attach socket, as packets."""

from typing import Any

from kvtier.abi.attach import VERSION
from kvtier.v1 import session_pb2


def of_client(**message: Any) -> bytes:
    return session_pb2.SessionRequest(**message).SerializeToString()


def of_daemon(**message: Any) -> bytes:
    return session_pb2.SessionReply(**message).SerializeToString()


def hello(token: str | None = None) -> bytes:
    return of_client(hello=session_pb2.Hello(version=VERSION, token=token or ""))


def map_cache(cache_id: int, *, write: bool) -> bytes:
    return of_client(map=session_pb2.MapCache(cache_id=cache_id, write=write))


def bye() -> bytes:
    return of_client(bye=session_pb2.Bye())


def call(number: int, path: str, request: bytes, trace: str = "") -> bytes:
    return of_client(call=session_pb2.UnaryCall(number=number, path=path, request=request, trace=trace))


def reply(packet: bytes) -> Any:
    """The message in the daemon's packet. Raises ConnectionResetError for the end of the connection."""
    if not packet:
        raise ConnectionResetError("the daemon hung up")
    found = session_pb2.SessionReply.FromString(packet)
    name = found.WhichOneof("message")
    assert name is not None, packet
    return getattr(found, name)

"""Senseless messages for each RPC that a daemon's reflection names."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.integration.blocks import chain

_DEPTH: Final = 5
_HARVEST: Final = 64
_INTS: Final = (
    0,
    1,
    2,
    3,
    7,
    1 << 10,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -1,
    -(1 << 31),
)
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}
_FLOATS: Final = (0.0, 0.01, 1.0, -1.0, 1e308, float("inf"), float("nan"))
_TEXTS: Final = ("", "fuzz", "*", "..", "a/b", "\0", "\x1b[2J", "ä" * 200, "x" * 5000)
_KEYS: Final = chain("fuzz", 6)
_BYTES: Final = (b"", b"\0" * 32, _KEYS[0], b"".join(_KEYS), b"\xff" * 31, b"\x01" * 4096, b"".join(_KEYS)[:-1])


@dataclass(slots=True, frozen=True)
class Rpc:
    path: str
    request: type[Message]
    reply: type[Message]
    sends_many: bool
    gets_many: bool

    @property
    def ours(self) -> bool:
        return self.path.startswith("/kvtier.")


def reflected(target: str) -> list[Rpc]:
    """Returns all RPCs of a server. Blocking."""
    with grpc.insecure_channel(target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        return [
            Rpc(
                path=f"/{name}/{method.name}",
                request=GetMessageClass(method.input_type),
                reply=GetMessageClass(method.output_type),
                sends_many=method.client_streaming,
                gets_many=method.server_streaming,
            )
            for name in sorted(database.get_services())
            for method in pool.FindServiceByName(name).methods
        ]


class Fuzzer:
    """Makes messages, with numbers from the daemon's answers: ids of caches, leases, sessions and slots."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ids: list[int] = [1]

    def messages(self, rpc: Rpc) -> list[bytes]:
        """Returns the messages of a call, some of them spoilt."""
        count = self._rng.randint(0, 4) if rpc.sends_many else 1
        return [self._spoilt(self._filled(rpc.request(), 0).SerializeToString(), rpc) for _ in range(count)]

    def learn(self, reply: Message) -> None:
        for number in _numbers(reply):
            self._ids.append(number)
        del self._ids[:-_HARVEST]

    def _spoilt(self, data: bytes, rpc: Rpc) -> bytes:
        if not rpc.ours or self._rng.random() < 0.8:
            return data
        spoilt = bytearray(data or b"\xff\xff")
        match self._rng.randrange(3):
            case 0:
                spoilt[self._rng.randrange(len(spoilt))] ^= 1 << self._rng.randrange(8)
            case 1:
                del spoilt[self._rng.randrange(len(spoilt)) :]
            case _:
                spoilt += self._rng.randbytes(self._rng.randint(1, 40))
        return bytes(spoilt)

    def _filled(self, message: Message, depth: int) -> Message:
        for field in message.DESCRIPTOR.fields:
            if self._rng.random() < 0.3 or depth == _DEPTH:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                for _ in range(self._rng.choice((0, 1, 1, 2, 5))):
                    self._append(getattr(message, field.name), field, depth)
            elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                self._filled(getattr(message, field.name), depth + 1)
                getattr(message, field.name).SetInParent()
            else:
                setattr(message, field.name, self._value(field))
        return message

    def _append(self, values: Any, field: Any, depth: int) -> None:
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            self._filled(values.add(), depth + 1)
        else:
            values.append(self._value(field))

    def _value(self, field: Any) -> Any:
        rng = self._rng
        if field.cpp_type in _RANGES:
            least, most = _RANGES[field.cpp_type]
            some = _INTS[:4] if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM and rng.random() < 0.8 else _INTS
            return min(max(rng.choice(self._ids if rng.random() < 0.5 else some), least), most)
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return rng.choice(_FLOATS)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        return rng.choice(_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)


def _numbers(message: Message) -> Iterator[int]:
    """Yields all whole numbers in a message."""
    for field, value in message.ListFields():
        for each in value if field.is_repeated else [value]:
            if isinstance(each, Message):
                yield from _numbers(each)
            elif field.cpp_type in _RANGES:
                yield each

"""Keeps kvtier.v1 compatible with every client there is: holds its descriptors against a committed lock file.

The lock has one line per field, enum value and method. A line that is gone or changed breaks a client. A new line
breaks no client; ``--update`` (run by ``make stubs``) adds it to the lock.

To break compatibility on purpose, before anything is released: delete the lock and run ``make stubs``.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "proto" / "kvtier.v1.lock"
HEADER = "# Written by `make stubs`, held against the protos by `make check`. See .ci/proto_compat.py\n"


def surface(files: Iterable[FileDescriptorProto]) -> dict[str, str]:
    """Describes each field, enum value and method by its full name."""
    return dict(each for file in files for each in _file(file))


def _file(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    for message in file.message_type:
        yield from _message(file.package, message)
    for enum in file.enum_type:
        yield from _enum(file.package, enum)
    for service in file.service:
        for method in service.method:
            request = "stream " * method.client_streaming + method.input_type.removeprefix(".")
            response = "stream " * method.server_streaming + method.output_type.removeprefix(".")
            yield f"{file.package}.{service.name}.{method.name}", f"rpc ({request}) returns ({response})"


def _message(scope: str, message: DescriptorProto) -> Iterator[tuple[str, str]]:
    name = f"{scope}.{message.name}"
    yield name, "message"
    for field in message.field:
        yield f"{name}.{field.name}", _field(message, field)
    for enum in message.enum_type:
        yield from _enum(name, enum)
    for nested in message.nested_type:
        yield from _message(name, nested)


def _enum(scope: str, enum: EnumDescriptorProto) -> Iterator[tuple[str, str]]:
    for value in enum.value:
        yield f"{scope}.{enum.name}.{value.name}", f"enum value {value.number}"


def _field(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    label = "repeated" if field.label == FieldDescriptorProto.LABEL_REPEATED else "singular"
    if field.proto3_optional:
        label = "optional"
    elif field.HasField("oneof_index"):
        label = f"oneof {message.oneof_decl[field.oneof_index].name}"
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"field {field.number} {label} {field.type_name.removeprefix('.') or scalar}"


def broken(lock: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each name of the lock that is gone or changed."""
    return [
        f"{name}: was '{was}', " + (f"is '{now[name]}'" if name in now else "is gone")
        for name, was in sorted(lock.items())
        if now.get(name) != was
    ]


def committed() -> list[FileDescriptorProto]:
    """The descriptors in the committed stubs."""
    names = sorted(path.stem for path in (ROOT / "client/kvtier/v1").glob("*_pb2.py"))
    descriptors = [importlib.import_module(f"kvtier.v1.{name}").DESCRIPTOR for name in names]
    return [FileDescriptorProto.FromString(each.serialized_pb) for each in descriptors]


def read_lock(text: str) -> dict[str, str]:
    entries = (line.partition(" = ")[::2] for line in text.splitlines() if line and not line.startswith("#"))
    return dict(entries)


def write_lock(entries: Mapping[str, str]) -> str:
    return HEADER + "".join(f"{name} = {what}\n" for name, what in sorted(entries.items()))


def main(*, update: bool) -> int:
    now = surface(committed())
    if not LOCK.exists() and not update:
        problems = [f"{LOCK.name} is missing (run `make stubs`)"]
    else:
        lock = read_lock(LOCK.read_text()) if LOCK.exists() else {}
        problems = broken(lock, now)
        if not problems and update:
            LOCK.write_text(write_lock(now))
        elif not problems:
            new = sorted(now.keys() - lock.keys())
            problems = [f"{name}: not in {LOCK.name} yet (run `make stubs`)" for name in new]
    for problem in problems:
        print(f"proto compatibility: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(update="--update" in sys.argv[1:]))

"""Keeps kvtier.v1 compatible with every client there is: holds its descriptors against a committed lock file.

The lock has one line per field, enum value and method. A line that is gone, or says something else, is a client broken.
A new line is fine, once it is in the lock, which is what `--update` (run by `make stubs`) does.

To break compatibility on purpose, before anything is released: delete the lock and run `make stubs`.
"""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

LOCK = Path(__file__).resolve().parent.parent / "proto" / "kvtier.v1.lock"
HEADER = "# Written by `make stubs`, held against the protos by `make check`. See .ci/proto_compat.py\n"


def surface(files: Iterable[FileDescriptorProto]) -> dict[str, str]:
    """What a client can see of `files`: the full name of each field, enum value and method -> what it is."""
    seen: dict[str, str] = {}
    for file in files:
        for message in file.message_type:
            seen.update(_message(file.package, message))
        for enum in file.enum_type:
            seen.update(_enum(file.package, enum))
        for service in file.service:
            for method in service.method:
                request = ("stream " if method.client_streaming else "") + _plain(method.input_type)
                response = ("stream " if method.server_streaming else "") + _plain(method.output_type)
                seen[f"{file.package}.{service.name}.{method.name}"] = f"rpc ({request}) returns ({response})"
    return seen


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
    kind = _plain(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"field {field.number} {label} {kind}"


def _plain(type_name: str) -> str:
    return type_name.removeprefix(".")


def broken(lock: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One line for each thing of the lock that is gone or changed."""
    return [
        f"{name}: was '{was}', " + (f"is '{now[name]}'" if name in now else "is gone")
        for name, was in sorted(lock.items())
        if now.get(name) != was
    ]


def committed() -> list[FileDescriptorProto]:
    """The descriptors in the committed stubs."""
    package = importlib.import_module("kvtier.v1")
    files = []
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        if module.endswith("_pb2"):
            file = FileDescriptorProto()
            importlib.import_module(f"kvtier.v1.{module}").DESCRIPTOR.CopyToProto(file)
            files.append(file)
    return files


def read_lock(text: str) -> dict[str, str]:
    """Parses what `write_lock` wrote."""
    entries = (line.partition(" = ")[::2] for line in text.splitlines() if line and not line.startswith("#"))
    return dict(entries)


def write_lock(entries: Mapping[str, str]) -> str:
    """One `name = what` line each, sorted."""
    return HEADER + "".join(f"{name} = {what}\n" for name, what in sorted(entries.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="add what is new to the lock")
    update = parser.parse_args(arguments).update

    now = surface(committed())
    if not LOCK.exists() and not update:
        problems = [f"{LOCK.name} is missing (run `make stubs`)"]
    else:
        lock = read_lock(LOCK.read_text()) if LOCK.exists() else {}
        problems = broken(lock, now)
        if not problems and update:
            LOCK.write_text(write_lock(now))
        elif not problems:
            problems = [
                f"{name}: not in {LOCK.name} yet (run `make stubs`)" for name in sorted(now.keys() - lock.keys())
            ]
    for problem in problems:
        print(f"proto compatibility: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""The compatibility check of .ci/proto_compat.py catches what would break a client, and only that."""

from collections.abc import Callable

import proto_compat
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

Edit = Callable[[FileDescriptorProto], object]


def shop():
    """A small package with everything a proto can hold: fields, a nested message, an enum and a stream."""
    file = FileDescriptorProto(package="shop.v1")
    order = file.message_type.add(name="Order")
    line = order.nested_type.add(name="Line")
    fields = ((order, "id", "UINT64"), (order, "note", "STRING"), (line, "price", "SINT32"))
    for message, name, kind in fields:
        number, type_ = len(message.field) + 1, FieldDescriptorProto.Type.Value(f"TYPE_{kind}")
        message.field.add(name=name, number=number, type=type_, label=FieldDescriptorProto.LABEL_OPTIONAL)
    colour = file.enum_type.add(name="Colour")
    colour.value.add(name="RED", number=0)
    colour.value.add(name="BLUE", number=1)
    service = file.service.add(name="Shop")
    service.method.add(name="Follow", input_type=".shop.v1.Order", output_type=".shop.v1.Order", server_streaming=True)
    return file


def problems_of(edit):
    changed = shop()
    edit(changed)
    lock = proto_compat.read_lock(proto_compat.write_lock(proto_compat.surface([shop()])))
    return proto_compat.broken(lock, proto_compat.surface([changed]))


BREAKING: dict[str, tuple[Edit, str]] = {
    "a field removed": (lambda f: f.message_type[0].field.pop(1), "shop.v1.Order.note: was"),
    "a field renumbered": (lambda f: setattr(f.message_type[0].field[0], "number", 7), "shop.v1.Order.id: was"),
    "a field of another type": (lambda f: setattr(f.message_type[0].field[0], "type", 9), "shop.v1.Order.id: was"),
    "a field made repeated": (lambda f: setattr(f.message_type[0].field[0], "label", 3), "shop.v1.Order.id: was"),
    "a field renamed": (lambda f: setattr(f.message_type[0].field[1], "name", "text"), "shop.v1.Order.note: was"),
    "a nested message removed": (lambda f: f.message_type[0].nested_type.pop(), "shop.v1.Order.Line: was"),
    "an enum value removed": (lambda f: f.enum_type[0].value.pop(), "shop.v1.Colour.BLUE: was"),
    "an enum value renumbered": (lambda f: setattr(f.enum_type[0].value[1], "number", 2), "shop.v1.Colour.BLUE: was"),
    "a method removed": (lambda f: f.service[0].method.pop(), "shop.v1.Shop.Follow: was"),
    "a stream made unary": (
        lambda f: f.service[0].method[0].ClearField("server_streaming"),
        "shop.v1.Shop.Follow: was",
    ),
}


@pytest.mark.parametrize(("edit", "line"), BREAKING.values(), ids=BREAKING.keys())
def test_a_breaking_change_is_named(edit, line):
    assert any(problem.startswith(line) for problem in problems_of(edit))


def test_additions_break_nobody():
    def add(file):
        file.message_type[0].field.add(name="paid", number=3, type=FieldDescriptorProto.TYPE_BOOL)
        file.message_type.add(name="Receipt")
        file.enum_type[0].value.add(name="GREEN", number=2)
        file.service[0].method.add(name="Pay", input_type=".shop.v1.Order", output_type=".shop.v1.Receipt")

    assert problems_of(add) == []


def test_a_removal_from_the_real_contract_is_caught():
    lock = proto_compat.read_lock(proto_compat.LOCK.read_text())
    files = proto_compat.committed()
    assert proto_compat.broken(lock, proto_compat.surface(files)) == []

    events = next(file for file in files if file.name == "kvtier/v1/events.proto")
    event = next(message for message in events.message_type if message.name == "Event")
    removed = event.field.pop(0)
    event.field[0].number += 100
    assert [problem.split(":")[0] for problem in proto_compat.broken(lock, proto_compat.surface(files))] == sorted(
        [f"kvtier.v1.Event.{removed.name}", f"kvtier.v1.Event.{event.field[0].name}"]
    )

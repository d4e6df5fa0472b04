from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi import attach
from kvtier.abi.attach import (
    AddressError,
    AttachProtocolError,
    Bye,
    CudaHandle,
    Failure,
    Forget,
    Hello,
    Map,
    MapReply,
    Welcome,
)

TOKEN = "0123456789abcdef" * 2
UUID = "fedcba9876543210" * 2


@pytest.mark.parametrize(
    "message",
    [
        Hello(),
        Hello(token=TOKEN),
        Map(7, write=True),
        Map(2**64 - 1, write=False),
        Forget(TOKEN),
        Bye(),
    ],
)
def test_requests_arrive_as_sent(message):
    assert attach.decode_request(attach.encode(message)) == message


def test_replies_arrive_as_sent():
    welcome = Welcome(TOKEN, session_id=3, resumed=True, epoch=1, boot=2, pid=77, history=99)
    failure = Failure("UNKNOWN_CACHE", "no cache 9")
    assert attach.decode_welcome(attach.encode(welcome)) == welcome
    assert attach.decode_welcome(attach.encode(failure)) == failure
    assert attach.decode_mapped(attach.encode(failure)) == failure
    for fds in (("control",), ("control", "host"), ("control", "device"), ("control", "host", "device")):
        assert attach.decode_mapped(attach.encode(MapReply(fds))) == MapReply(fds)


@pytest.mark.parametrize(
    "mapped",
    [
        MapReply(("control", "cuda"), CudaHandle(UUID, 1 << 21)),
        MapReply(("control", "host", "cuda"), CudaHandle(UUID, 2**63)),
        MapReply(("control", "host"), unmapped={"device": "a CUDA handle has no read-only form"}),
        MapReply(("control", "cuda"), CudaHandle(UUID, 1), {"host": "not made yet"}),
    ],
)
def test_what_came_of_a_gpu_and_what_did_not_arrives_as_sent(mapped):
    assert attach.decode_mapped(attach.encode(mapped)) == mapped


def test_messages_look_as_documented():
    assert json.loads(attach.encode(Hello())) == {"op": "hello", "version": 1}
    assert json.loads(attach.encode(Map(4, write=False))) == {"op": "map", "cache_id": 4, "write": False}
    assert json.loads(attach.encode(Bye())) == {"op": "bye"}
    assert json.loads(attach.encode(MapReply(("control",)))) == {"ok": True, "fds": ["control"]}
    assert json.loads(attach.encode(MapReply(("control", "cuda"), CudaHandle(UUID, 4096), {"host": "w"}))) == {
        "ok": True,
        "fds": ["control", "cuda"],
        "cuda": {"uuid": UUID, "bytes": 4096},
        "unmapped": {"host": "w"},
    }
    assert json.loads(attach.encode(Failure("R", "m"))) == {"ok": False, "reason": "R", "message": "m"}


@pytest.mark.parametrize(
    ("sent", "reason", "says"),
    [
        (b"", "BAD_MESSAGE", "JSON"),
        (b"\xff\xfe", "BAD_MESSAGE", "JSON"),
        (b"[1]", "BAD_MESSAGE", "list"),
        (b"[" * 60_000, "BAD_MESSAGE", "JSON"),
        (b'{"op":"hello","version":' + b"9" * 5000 + b"}", "BAD_MESSAGE", "JSON"),
        (b'{"op":"map","cache_id":1,"cache_id":2,"write":false}', "BAD_MESSAGE", "twice"),
        (b" " * (attach.MAX_MESSAGE + 1), "TOO_LONG", "65536"),
        (b"{}", "UNKNOWN_OP", "None"),
        (b'{"op":"format"}', "UNKNOWN_OP", "format"),
        (b'{"op":["hello"]}', "UNKNOWN_OP", "hello"),
        (b'{"op":"hello","version":2,"token":5,"new":1}', "BAD_VERSION", "version 1; upgrade the daemon"),
        (b'{"op":"hello","version":0}', "BAD_VERSION", "version 1; upgrade the client"),
        (b'{"op":"hello"}', "BAD_FIELD", "version is missing"),
        (b'{"op":"hello","version":1,"token":"0123"}', "BAD_FIELD", "32"),
        (b'{"op":"hello","version":1,"token":"' + TOKEN.upper().encode() + b'"}', "BAD_FIELD", "lower-case"),
        (b'{"op":"hello","version":1,"colour":"blue"}', "BAD_FIELD", "colour"),
        (b'{"op":"bye","why":"done"}', "BAD_FIELD", "why"),
        (b'{"op":"map","cache_id":1}', "BAD_FIELD", "write is missing"),
        (b'{"op":"map","cache_id":18446744073709551616,"write":false}', "BAD_FIELD", "cache_id"),
        (b'{"op":"map","cache_id":1,"write":1}', "BAD_FIELD", "write"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(sent, reason, says):
    with pytest.raises(AttachProtocolError) as refused:
        attach.decode_request(sent)
    assert refused.value.reason == reason
    assert says in refused.value.message
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    "sent",
    [
        {"ok": True},
        {"ok": 1, "fds": ["control"]},
        {"fds": ["control"]},
        {"ok": True, "fds": []},
        {"ok": True, "fds": ["host"]},
        {"ok": True, "fds": ["control", "device", "host"]},
        {"ok": True, "fds": ["control", "disk"]},
        {"ok": True, "fds": ["control", ["host"]]},
        {"ok": True, "fds": "control"},
        {"ok": True, "fds": ["control"], "more": 1},
        {"ok": True, "fds": ["control", "device", "cuda"], "cuda": {"uuid": UUID, "bytes": 1}},
        {"ok": True, "fds": ["control", "cuda"]},
        {"ok": True, "fds": ["control", "device"], "cuda": {"uuid": UUID, "bytes": 1}},
        {"ok": True, "fds": ["control", "cuda"], "cuda": [UUID, 1]},
        {"ok": True, "fds": ["control", "cuda"], "cuda": {"uuid": UUID}},
        {"ok": True, "fds": ["control", "cuda"], "cuda": {"uuid": UUID.upper(), "bytes": 1}},
        {"ok": True, "fds": ["control", "cuda"], "cuda": {"uuid": UUID, "bytes": 0}},
        {"ok": True, "fds": ["control", "cuda"], "cuda": {"uuid": UUID, "bytes": 1, "name": "x"}},
        {"ok": True, "fds": ["control", "cuda"], "cuda": {"uuid": UUID, "bytes": 1}, "unmapped": {"device": "w"}},
        {"ok": True, "fds": ["control", "host"], "unmapped": {"host": "w"}},
        {"ok": True, "fds": ["control"], "unmapped": {"disk": "w"}},
        {"ok": True, "fds": ["control"], "unmapped": {"device": 5}},
        {"ok": True, "fds": ["control"], "unmapped": ["device"]},
        {"ok": False, "reason": "R"},
    ],
)
def test_bad_replies_are_refused(sent):
    with pytest.raises(AttachProtocolError):
        attach.decode_mapped(json.dumps(sent).encode())


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(
        lambda value: json.dumps({"op": "hello", "version": value, "token": value}).encode()
    )
)
def test_no_bytes_raise_anything_else(sent):
    for decode in (attach.decode_request, attach.decode_welcome, attach.decode_mapped):
        with pytest.raises(AttachProtocolError):
            decode(sent)


def test_nothing_too_long_is_sent():
    with pytest.raises(AttachProtocolError, match="65536"):
        attach.encode(Failure("R", "x" * attach.MAX_MESSAGE))


def test_an_over_long_message_is_seen_on_a_real_socket():
    """The reader asks for one byte more than a message may have, as ``MAX_MESSAGE`` advises."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(attach.encode(Hello()).ljust(attach.MAX_MESSAGE))
        assert attach.decode_request(ours.recv(attach.MAX_MESSAGE + 1)) == Hello()
        theirs.send(attach.encode(Hello()).ljust(attach.MAX_MESSAGE + 500))
        with pytest.raises(AttachProtocolError) as refused:
            attach.decode_request(ours.recv(attach.MAX_MESSAGE + 1))
        assert refused.value.reason == "TOO_LONG"


def test_longest_socket_path_binds_and_a_longer_one_is_refused(short_dir):
    room = attach.MAX_SOCKET_PATH - len(f"{short_dir}//{attach.ATTACH_SOCKET}")
    longest = short_dir / ("d" * room)
    longest.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(attach.socket_path(longest, attach.ATTACH_SOCKET))
    with pytest.raises(AddressError, match="108 bytes; the limit is 107"):
        attach.socket_path(short_dir / ("d" * (room + 1)), attach.ATTACH_SOCKET)


def test_default_address(monkeypatch):
    monkeypatch.delenv("KVTIER_ADDRESS", raising=False)
    assert attach.default_address() == "/run/kvtier"
    monkeypatch.setenv("KVTIER_ADDRESS", "/tmp/kv")
    assert attach.default_address() == "/tmp/kv"

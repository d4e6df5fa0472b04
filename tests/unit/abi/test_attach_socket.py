import socket

import pytest

from kvtier.abi import attach


def test_longest_socket_path_binds_and_a_longer_one_is_refused(short_dir):
    room = attach.MAX_SOCKET_PATH - len(f"{short_dir}//{attach.ATTACH_SOCKET}")
    longest = short_dir / ("d" * room)
    longest.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(attach.socket_path(longest, attach.ATTACH_SOCKET))
    with pytest.raises(attach.AddressError, match="108 bytes; the limit is 107"):
        attach.socket_path(short_dir / ("d" * (room + 1)), attach.ATTACH_SOCKET)


def test_default_address(monkeypatch):
    monkeypatch.delenv("KVTIER_ADDRESS", raising=False)
    assert attach.default_address() == "/run/kvtier"
    monkeypatch.setenv("KVTIER_ADDRESS", "/tmp/kv")
    assert attach.default_address() == "/tmp/kv"

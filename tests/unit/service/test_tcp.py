import pytest

from kvtierd.config import ConfigError, read

FILES = {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}


@pytest.mark.parametrize(
    ("keys", "target"),
    [
        ({"listen_tcp": "0.0.0.0:7000", **FILES}, "0.0.0.0:7000"),
        ({"listen_tcp": "[::]:7000", **FILES}, "[::]:7000"),
        ({"listen_tcp": "kv.example:0", **FILES}, "kv.example:0"),
        ({"listen_tcp": "127.0.0.1:7000", "tcp_insecure": True}, "127.0.0.1:7000"),
        ({"listen_tcp": "localhost:7000", "tcp_insecure": True}, "localhost:7000"),
        ({"listen_tcp": "[::1]:7000", "tcp_insecure": True}, "[::1]:7000"),
    ],
)
def test_tcp_listens_with_tls_or_on_the_loopback_by_choice(keys: dict[str, object], target: str) -> None:
    tcp = read(None, {"host_bytes": 4096, **keys}).config.tcp
    assert tcp is not None
    assert tcp.target == target
    assert (tcp.tls is None) == ("tcp_insecure" in keys)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"listen_tcp": "0.0.0.0:7000"}, "needs tls_cert and tls_key and tls_client_ca for TLS"),
        ({"listen_tcp": "127.0.0.1:7000"}, "or tcp_insecure = true on a loopback address"),
        ({"listen_tcp": "127.0.0.1:7000", "tls_cert": "c", "tls_key": "k"}, "needs tls_client_ca for TLS"),
        ({"listen_tcp": "0.0.0.0:7000", "tcp_insecure": True}, "without TLS only a loopback address will do"),
        ({"listen_tcp": "kv.example:7000", "tcp_insecure": True}, "without TLS only a loopback address will do"),
        ({"listen_tcp": "127.0.0.1:7000", "tcp_insecure": True, **FILES}, "take one or the other away"),
        ({"listen_tcp": "127.0.0.1:7000", "tcp_insecure": True, "tls_key": "k"}, "set all of them or none"),
        ({"listen_tcp": "7000", **FILES}, "must be host:port"),
        ({"listen_tcp": "::1:7000", **FILES}, "[host]:port for IPv6"),
        ({"listen_tcp": "h:70000", **FILES}, "h:70000: the port must be 0 to 65535"),
    ],
)
def test_anything_else_is_refused_at_the_start_with_the_reason(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(None, {"host_bytes": 4096, **keys})
    assert says in str(refused.value)

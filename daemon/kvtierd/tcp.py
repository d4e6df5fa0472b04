"""The TCP listener: its address and the identification of clients.

Clients on other hosts need TLS with a certificate of their own. Without TLS clients cannot be told apart, so it is only
for the loopback interface, and only if the configuration asks for it explicitly.

Every read of the configuration imports this module, so imports for listening are made in functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvtier.abi.attach import HOST_PORT, MAX_PORT, is_loopback

if TYPE_CHECKING:
    import grpc


@dataclass(slots=True, frozen=True)
class ServerTlsFiles:
    """PEM files: the daemon's certificate chain and key, and the authorities that vouch for clients."""

    cert: Path
    key: Path
    client_ca: Path

    def faults(self) -> Iterator[tuple[str, Path, str]]:
        """Faults of the files: key, file and reason. gRPC would only say that it cannot bind."""
        files = {"tls_cert": self.cert, "tls_key": self.key, "tls_client_ca": self.client_ca}
        reasons = {name: _unreadable(file) for name, file in files.items()}
        yield from ((name, files[name], reason) for name, reason in reasons.items() if reason)
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if not reasons["tls_cert"] and not reasons["tls_key"]:
            try:
                context.load_cert_chain(self.cert, self.key, password=lambda: b"")
            except (ssl.SSLError, ValueError) as error:
                yield "tls_cert", self.cert, f"is no certificate that fits tls_key: {error}"
        if not reasons["tls_client_ca"]:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                yield "tls_client_ca", self.client_ca, f"holds no certificate: {error}"


@dataclass(slots=True, frozen=True)
class TcpListener:
    """The listener's settings. ``tls``: None = no TLS, on the loopback interface only."""

    host: str
    port: int
    tls: ServerTlsFiles | None

    @classmethod
    def of(
        cls,
        address: str,
        cert: Path | None,
        key: Path | None,
        client_ca: Path | None,
        *,
        insecure: bool,
        name: str = "listen_tcp",
    ) -> Self:
        """Raises ValueError, naming the key at fault, for a forbidden combination. ``name``: the key of ``address``."""
        host, port = host_and_port(name, address)
        if cert is not None and key is not None and client_ca is not None:
            if insecure:
                raise ValueError("tcp_insecure = true: there is TLS; take one or the other away")
            return cls(host, port, ServerTlsFiles(cert, key, client_ca))
        files = {"tls_cert": cert, "tls_key": key, "tls_client_ca": client_ca}
        missing = [name for name, file in files.items() if file is None]
        if not insecure:
            raise ValueError(
                f"{name} = {address}: needs {' and '.join(missing)} for TLS with client certificates, "
                "or tcp_insecure = true on a loopback address"
            )
        if len(missing) < len(files):
            raise ValueError("tcp_insecure = true: some of the keys of TLS are set; set all of them or none")
        if not is_loopback(host):
            raise ValueError(f"{name} = {address}: without TLS only a loopback address will do")
        return cls(host, port, None)

    @property
    def target(self) -> str:
        """The address in gRPC's form."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def credentials(self) -> grpc.ServerCredentials | None:
        """Reads the files; None without TLS. Raises :class:`TierConfigError` for their faults."""
        if self.tls is None:
            return None
        import grpc

        from kvtierd.tiers.base import TierConfigError

        for name, file, reason in self.tls.faults():
            raise TierConfigError(name, file, reason)
        pair = (self.tls.key.read_bytes(), self.tls.cert.read_bytes())
        return grpc.ssl_server_credentials([pair], self.tls.client_ca.read_bytes(), require_client_auth=True)


def host_and_port(key: str, address: str) -> tuple[str, int]:
    """Raises ValueError, naming the key, for a malformed address."""
    found = HOST_PORT.fullmatch(address)
    if found is None:
        raise ValueError(f"{key} = {address}: must be host:port, or [host]:port for IPv6")
    if int(found[3]) > MAX_PORT:
        raise ValueError(f"{key} = {address}: the port must be 0 to {MAX_PORT}")
    return found[1] or found[2], int(found[3])


def _unreadable(path: Path) -> str | None:
    """The reason why a file cannot be read, else None."""
    try:
        path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None

"""An authority of the tests' own, a daemon's certificate and clients'."""

from pathlib import Path

import trustme

from kvtier import TlsFiles


class Authority:
    """Writes PEM files below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._ca = trustme.CA()
        self._directory = directory
        self.ca = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, *names: str, common_name: str | None = None) -> TlsFiles:
        """A certificate for these alternative names, its key, and this authority."""
        made = self._ca.issue_cert(*names, common_name=common_name)
        stem = common_name or names[0]
        cert, key = self._directory / f"{stem}.pem", self._directory / f"{stem}.key"
        cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)
        return TlsFiles(cert, key, self.ca)

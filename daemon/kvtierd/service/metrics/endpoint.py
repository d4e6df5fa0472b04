"""The HTTP endpoint that Prometheus scrapes: prometheus_client's application in one thread, one request at a time."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from kvtierd.tiers.base import TierConfigError

SILENT_S: Final = 2.0
"""A client that neither sends nor takes anything for so long makes way for the next."""
_POLL_S: Final = 0.1

_log = logging.getLogger(__name__)


class _Server(WSGIServer):
    request_queue_size = 8

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the resolver for a name that nobody needs.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a scrape was cut off", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("scrape %s", format % args)


class MetricsEndpoint:
    """Serves from its making until :meth:`stop`."""

    def __init__(self, host: str, port: int, collector: Collector) -> None:
        """Raises :class:`TierConfigError` where the address cannot be had. ``port`` 0 = any that is free."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(collector)
        app = make_wsgi_app(registry)
        kind = _Server6 if ":" in host else _Server
        try:
            self._server: Final = make_server(host, port, app, server_class=kind, handler_class=_Handler)
        except OSError as error:
            raise TierConfigError("metrics_listen", f"{host}:{port}", f"cannot listen there: {error}") from error
        self.port: Final = self._server.server_port
        self._thread: Final = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="kvtierd-metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Blocks until the scrape in hand has ended: call from a thread, for the loop may have to answer it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

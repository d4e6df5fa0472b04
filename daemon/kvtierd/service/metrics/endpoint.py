"""The HTTP endpoint that Prometheus scrapes: prometheus_client's application, which answers one request at a time.

Each connection has a thread, so that one that says nothing holds up none but itself; there are few, each with an end.
"""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from kvtierd.tiers.base import TierConfigError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

SILENT_S: Final = 2.0
"""A client that has not sent its request by then, or takes nothing of the answer for so long, is hung up on."""
MOST_CONNECTIONS: Final = 16
"""The next ones wait until one of them has ended."""
_POLL_S: Final = 0.1

_log = logging.getLogger(__name__)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    request_queue_size = MOST_CONNECTIONS
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._places: Final = threading.Semaphore(MOST_CONNECTIONS)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the resolver for a name that nobody needs.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is to be had
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def ended(self) -> None:
        """Blocks until no connection has a thread; none must come any more."""
        for _ in range(MOST_CONNECTIONS):
            self._places.acquire()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a scrape was cut off", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Until(io.RawIOBase):
    """What a connection sends until a point in time, then TimeoutError: however little comes at once."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection: Final = connection
        self._end: Final = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request was not sent in time")
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(SILENT_S)


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def setup(self) -> None:
        super().setup()
        self.rfile.close()  # that of each read's own time
        self.rfile = io.BufferedReader(_Until(self.connection, SILENT_S))

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("scrape %s", format % args)


class MetricsEndpoint:
    """Serves from its making until :meth:`stop`."""

    def __init__(self, host: str, port: int, collector: Collector) -> None:
        """Raises :class:`TierConfigError` where the address cannot be had. ``port`` 0 = any that is free."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(collector)
        app = _one_at_a_time(make_wsgi_app(registry))
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
        """Blocks until the scrapes in hand have ended: call from a thread, for the loop may have to answer them."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.ended()


def _one_at_a_time(app: WSGIApplication) -> WSGIApplication:
    """Scrapes that come together cost the loop no more at once than one; its answer is whole when it is returned."""
    turn = threading.Lock()

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with turn:
            return app(environ, start_response)

    return answer

"""The page that Prometheus reads from `gear-loader serve --metrics`."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable

from gear_loader.storage.prometheus import CONTENT_TYPE

_PATH = "/metrics"
_TIMEOUT = 10.0  # seconds that a client may take to send its request


class MetricsPage:
    """Serves ``/metrics`` by HTTP, in threads of this process, until `close`.

    Args:
        text: makes the page. host, port: address to listen at; port 0 chooses a free one.

    Attributes:
        url: of the page.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, text: Callable[[], str], host: str, port: int) -> None:
        class PageHandler(http.server.BaseHTTPRequestHandler):
            timeout = _TIMEOUT

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != _PATH:
                    self.send_error(404, explain=f"The metrics are at {_PATH}.")
                    return
                page = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, *_: object) -> None:
                """Say nothing of each request."""

        class PageServer(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        try:
            self._server = PageServer((host, port), PageHandler)
        except OSError as error:
            raise OSError(f"The metrics cannot be served at {host}:{port}: {error}.") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}{_PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="gear-loader metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()

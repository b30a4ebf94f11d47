"""A bucket on this machine: moto's S3 server, with answers that come later; prints its port; ends with its input."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any


def main(latency: float) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    store = DomainDispatcherApplication(create_backend_app)

    def later(environ: Any, start: Any) -> Iterable[bytes]:
        time.sleep(latency)
        answer: Iterable[bytes] = store(environ, start)
        return answer

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None:
            pass

    server = make_server("127.0.0.1", 0, later, threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main(float(sys.argv[1]))

"""An S3 server (moto's), and before it a proxy that fails as a test plans it; run as a process of its own.

The proxy answers ``PUT /-plan`` with a JSON body: from request `at` on, `times` requests get what `act` says, and `pid`
is the process that "kill" ends. ``GET /-seen`` returns the methods and paths of all requests since then.

=============  ==========================================================
cut            the connection is closed before the request is forwarded
cut-body       the same after half of the request's body
lost           the same after the store has done what it was asked
half           half of the answer's body arrives
kill, kill-body, kill-lost  as cut, cut-body and lost, and the process is killed
slow           the answer comes after 60 seconds
a number       an answer with this status
=============  ==========================================================
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any


class _Proxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    lock = threading.Lock()
    plan: dict[str, Any]
    seen: list[str]
    store: int

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/-seen":
            return self._answer(200, json.dumps(_Proxy.seen).encode())
        length = int(self.headers.get("Content-Length") or 0)
        if self.path == "/-plan":
            plan = json.loads(self.rfile.read(length))
            with self.lock:
                _Proxy.plan, _Proxy.seen = plan, []
            return self._answer(200, b"")
        with self.lock:
            plan, number = _Proxy.plan, len(_Proxy.seen)
            _Proxy.seen.append(f"{self.command} {self.path}")
        at, times = plan.get("at", 0), plan.get("times", 1)
        act = plan.get("act", "") if number >= at and (times < 0 or number < at + times) else ""
        time.sleep(plan.get("latency", 0))
        self._serve(act, plan.get("pid", 0), length)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self, act: str, pid: int, length: int) -> None:
        if act in ("cut", "kill"):
            return self._end(act, pid)
        if act in ("cut-body", "kill-body"):
            self.rfile.read(length // 2)
            return self._end(act, pid)
        body = self.rfile.read(length)
        if act.isdigit():
            text = f"<Error><Code>{act}</Code><Message>planned</Message></Error>".encode()
            return self._answer(int(act), text)
        if act == "slow":
            time.sleep(60)
        store = http.client.HTTPConnection("127.0.0.1", self.store)
        with contextlib.closing(store):
            store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    store.putheader(name, value)
            store.endheaders(body)
            answer = store.getresponse()
            data = answer.read()
            if act in ("lost", "kill-lost"):
                return self._end(act, pid)
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            size = answer.getheader("Content-Length") if self.command == "HEAD" else len(data)
            self.send_header("Content-Length", str(size or 0))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if act == "half" else data)
            if act == "half":
                self._end(act, pid)

    def _end(self, act: str, pid: int) -> None:
        if act.startswith("kill"):
            os.kill(pid, signal.SIGKILL)
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *arguments: Any) -> None:
        """Connections that the plan has cut."""


def main() -> None:
    from moto.server import ThreadedMotoServer

    store = ThreadedMotoServer(port=0, verbose=False)
    store.start()
    _Proxy.store = store.get_host_and_port()[1]
    _Proxy.plan, _Proxy.seen = {}, []
    proxy = _Server(("127.0.0.1", 0), _Proxy)
    print(proxy.server_port, flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    proxy.serve_forever()


class ObjectStore:
    """The process, from a test.

    Attributes:
        url: of the proxy, for ``AWS_ENDPOINT_URL``.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def plan(self, **plan: Any) -> None:
        """Fail from now on; without arguments, no longer."""
        request = urllib.request.Request(f"{self.url}/-plan", json.dumps(plan).encode(), method="PUT")
        urllib.request.urlopen(request).read()

    def seen(self) -> list[str]:
        """Requests since the plan."""
        with urllib.request.urlopen(f"{self.url}/-seen") as answer:
            return list(json.loads(answer.read()))


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Start the process and make ``s3://bucket``, which the environment leads to; end the process with the block."""
    import fsspec
    import pytest

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, __file__], **pipes) as process:  # type: ignore[call-overload]
        try:
            store = ObjectStore(int(process.stdout.readline()))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("AWS_ENDPOINT_URL", store.url)
                patch.setenv("AWS_ACCESS_KEY_ID", "test")
                patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
                patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
                kind = fsspec.get_filesystem_class("s3")
                kind.clear_instance_cache()  # of the process before, at another address
                kind().mkdir("bucket")
                yield store
        finally:
            process.kill()


if __name__ == "__main__":
    main()

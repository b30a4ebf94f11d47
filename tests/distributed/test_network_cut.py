"""Two network namespaces joined by a virtual cable that is cut and mended."""

from __future__ import annotations

import contextlib
import json
import os
import time

import pytest
from distributed_common import filled
from network_common import SECRET, ask, inside, ip, line_of, possible, two_networks

REQUESTER = """
import sys
import numpy as np
import gear_loader as gear
from gear_loader.transport.client import Peer
from gear_loader.transport.spec import WindowSpec
from distributed_common import SCHEMA

spec = WindowSpec(sys.argv[2], gear.Schema(SCHEMA), dict.fromkeys(SCHEMA, gear.Window(4)))
peer = Peer(sys.argv[1], secret=sys.argv[3].encode(), timeout=2.0, name="node a")
for _ in sys.stdin:
    out = np.zeros(spec.reply_bytes(3), dtype=np.uint8)
    try:
        status = peer.fetch(spec, np.arange(3), np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.int64), out).result(30)
        print("got", int((status == 0).sum()), flush=True)
    except gear.errors.GearError as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(not possible(), reason="network namespaces cannot be made here (root and ip are needed)")
def test_a_cut_network_is_an_error_at_the_deadline_and_requests_go_on_after_it_mends() -> None:
    table = filled(f"gear-cut-{os.getpid()}", 0, [5])
    assert table.name is not None
    with contextlib.ExitStack() as stack:
        stack.callback(table.unlink)
        one, two = stack.enter_context(two_networks())
        server = inside(one, "-m", "gear_loader", "serve", table.name, "--listen", "10.77.0.1:0")
        stack.callback(server.wait)
        stack.callback(server.kill)
        address = json.loads(line_of(server))["addresses"]["socket"]
        requester = inside(two, "-c", REQUESTER, address, table.name, SECRET)
        stack.callback(requester.wait)
        stack.callback(requester.kill)
        assert ask(requester) == "got 3"
        ip("-n", two, "link", "set", "w0", "down")
        message = ask(requester)
        assert message.startswith(f"PeerTimeoutError node a ({address}) was asked for 3 rows")
        ip("-n", two, "link", "set", "w0", "up")
        deadline = time.monotonic() + 60  # the system takes a moment to find the way again
        while (answer := ask(requester)) != "got 3":
            assert time.monotonic() < deadline, answer
        for process in (requester, server):
            assert process.stdin is not None
            process.stdin.close()
            assert process.stdout is not None
            process.stdout.close()

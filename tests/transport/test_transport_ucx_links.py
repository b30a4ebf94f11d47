"""ucxx on the UCX of NIXL's wheel: one UCX, with verbs, that carries messages."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_common import run

from gear_loader.errors import TransportError
from gear_loader.transport import nixl_agent, ucx_links

BOTH = pytest.mark.skipif(
    nixl_agent.installed() is None or importlib.util.find_spec("ucxx") is None, reason="needs ucxx and NIXL"
)
TRY = """
import asyncio, numpy as np, ucxx
from gear_loader.transport.ucx import UcxCarrier

async def main():
    async def serve(channel):
        await channel.secured()
        message = np.zeros(1 << 20, np.uint8)
        await channel.recv_into(message)
        await channel.send(message[::-1].copy())
        await channel.close()
    listener = await UcxCarrier().listen("127.0.0.1", 0, serve)
    channel = await UcxCarrier().connect(listener.address)
    await channel.secured()
    sent = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    received = np.zeros_like(sent)
    await channel.send(sent)
    await channel.recv_into(received)
    assert (received == sent[::-1]).all()
    await channel.close()
    await listener.close()

asyncio.run(main())
import nixl_cu12._api
from gear_loader.transport.nixl_agent import new_agent
agent = new_agent("a", loopback=True)
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "/libuc" in line and ".so" in line}
print(ucxx.get_ucx_version(), sorted(path.rpartition("/")[2] for path in libraries))
"""


@pytest.mark.long
@BOTH
def test_ucxx_and_nixl_share_a_ucx_with_verbs(tmp_path: Path) -> None:
    folder = tmp_path / "links"
    environment = {**os.environ, **ucx_links.link_ucx(folder)}
    kept = os.lstat(folder / "libucp.so").st_ino
    assert ucx_links.link_ucx(folder)["LD_LIBRARY_PATH"].startswith(str(folder))
    assert os.lstat(folder / "libucp.so").st_ino == kept
    done = subprocess.run(
        [sys.executable, "-c", TRY], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.strip().splitlines()[-1]
    for name in ("libucp", "libucs", "libuct", "libucm"):
        assert found.count(f"'{name}-") == 1  # the wheel's, which has a hash in its name, and no other
        assert f"'{name}.so" not in found
    assert "libuct_ib.so" in found


def test_without_nixl_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_links, "installed", lambda: None)
    with pytest.raises(TransportError, match=r"pip install '\.\[nixl\]'"):
        ucx_links.link_ucx(tmp_path / "links")
    assert not (tmp_path / "links").exists()
    package = tmp_path / "nixl_of_a_build"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ucx_links, "installed", lambda: "nixl_of_a_build")
    with pytest.raises(TransportError, match=r"nixl_of_a_build\.libs/ucx does not exist"):
        ucx_links.link_ucx(tmp_path / "links")
    libraries = tmp_path / "nixl_of_a_build.libs"
    (libraries / "ucx").mkdir(parents=True)
    (libraries / "libucm-1.so.0").touch()
    with pytest.raises(TransportError, match=r"has 0 libraries libucs-\*"):
        ucx_links.link_ucx(tmp_path / "links")


@BOTH
def test_the_command_prints_what_a_shell_evaluates(tmp_path: Path) -> None:
    status, said = run("ucx-env", str(tmp_path / "my links"))
    assert status == 0
    assert f"export LD_LIBRARY_PATH='{tmp_path}/my links" in said
    assert "export RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true" in said

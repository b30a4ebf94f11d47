"""What every carrier has to do: its channels, and peers and servers on it. A new one is another entry of `CARRIERS`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from table_common import named, numbers_of, rows
from transport_common import (
    PATIENCE,
    Serving,
    certificate,
    check_fetch,
    generations_of,
    poisoned,
    six,
    spec_of,
)

import gear_loader as gear
from gear_loader.errors import TransportError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.transport import Channel, Peer, carrier
from gear_loader.transport.change_messages import Metadata, Update
from gear_loader.transport.spec import PackedSpec
from gear_loader.transport.store_message import Rows
from gear_loader.transport.tls import client_context, server_context

SIZES = (1, 64, 4095, 4096, 4097, 1 << 18, 3 << 20)
CARRIERS = {"socket": "socket", "tls": "socket", "ucx": "ucx"}


class Kind(NamedTuple):
    """A carrier: its name, and the TLS contexts of server and client."""

    name: str
    server: ssl.SSLContext | None
    client: ssl.SSLContext | None


@pytest.fixture(scope="module", params=CARRIERS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    if request.param == "ucx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    if request.param != "tls":
        return Kind(CARRIERS[request.param], None, None)
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is needed")
    files = certificate(tmp_path_factory.mktemp("tls"), "right", "IP:127.0.0.1")
    return Kind("socket", server_context(*files), client_context(files[0]))


# ---------------------------------------------------------------- channels


def between(kind: Kind, work: Callable[[Channel, Channel], Awaitable[None]]) -> None:
    """Run `work` with both ends of a connection."""

    async def main() -> None:
        accepted: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        over = asyncio.Event()

        async def serve(channel: Channel) -> None:
            if kind.server is not None:
                await channel.begin()  # type: ignore[attr-defined]
            await channel.secured()
            accepted.set_result(channel)
            await over.wait()

        listener = await carrier(kind.name, kind.server).listen("127.0.0.1", 0, serve)
        near = await carrier(kind.name, kind.client).connect(listener.address)
        await near.secured()
        far = await accepted
        try:
            await work(near, far)
        finally:
            for each in (near, far):
                await each.close()
                await each.close()
            over.set()
            await listener.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def data_of(size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


async def send_all(channel: Channel) -> None:
    for size in SIZES:
        await channel.send(data_of(size))
    await channel.send(*(data_of(size) for size in SIZES))


async def receive_all(channel: Channel) -> None:
    for size in SIZES * 2:
        buffer = np.full(size, 205, dtype=np.uint8)
        await channel.recv_into(buffer)
        assert (buffer == data_of(size)).all()


def test_messages_of_all_sizes_arrive_in_both_directions_at_once(kind: Kind) -> None:
    async def work(near: Channel, far: Channel) -> None:
        await asyncio.gather(send_all(near), receive_all(far), send_all(far), receive_all(near))

    between(kind, work)


def test_what_was_sent_before_the_end_arrives_and_then_there_is_an_error(kind: Kind) -> None:
    async def work(near: Channel, far: Channel) -> None:
        await near.send(data_of(1000), data_of(64))
        closing = asyncio.ensure_future(near.close())
        for size in (1000, 64):
            buffer = np.zeros(size, dtype=np.uint8)
            await far.recv_into(buffer)
            assert (buffer == data_of(size)).all()
        with pytest.raises(ConnectionError):
            await far.recv_into(np.zeros(1, dtype=np.uint8))
        with pytest.raises(ConnectionError):
            await send_all(far)  # more than the buffers of sockets hold
        await closing

    between(kind, work)


def test_closing_ends_what_waits_on_this_side(kind: Kind) -> None:
    async def work(near: Channel, far: Channel) -> None:
        waiting = asyncio.ensure_future(near.recv_into(np.zeros(1, dtype=np.uint8)))
        await asyncio.sleep(0.05)
        await near.close()
        with pytest.raises(ConnectionError):
            await waiting
        for call in (near.send(data_of(1)), near.recv_into(np.zeros(1, dtype=np.uint8))):
            with pytest.raises(ConnectionError):
                await call

    between(kind, work)


def test_addresses_of_other_carriers_and_without_a_listener(kind: Kind) -> None:
    async def work() -> None:
        with pytest.raises(TransportError, match=r"Address 'pigeon://a:1' was received; expected"):
            await carrier(kind.name, kind.client).connect("pigeon://a:1")
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        with pytest.raises(OSError, match=r"\d"):
            await carrier(kind.name, kind.client).connect(f"{kind.name}://127.0.0.1:{port}")

    asyncio.run(asyncio.wait_for(work(), PATIENCE))


# ---------------------------------------------------------------- peers and servers


@contextlib.contextmanager
def served(kind: Kind, table: gear.Table) -> Iterator[tuple[Serving, Peer]]:
    """A server of a table over the carrier, and a peer."""
    server = Serving(str(table.name), tls=kind.server)
    try:
        address = server.loop.run(server.server.listen(kind.name), PATIENCE)
        yield server, server.peer(address=address, tls=kind.client)
    finally:
        server.close()


@pytest.mark.parametrize("here", [True, False])
def test_requests_of_all_kinds(kind: Kind, here: bool) -> None:
    with six() as table, served(kind, table) as (_, peer):
        name, spec = str(table.name), spec_of(table)
        for _ in range(2):
            check_fetch(peer, table, spec, [3, 1, 5], [1, 2, 9], here=here)
            wide = spec_of(table, {"value": gear.Window(300)})
            check_fetch(peer, table, wide, np.arange(1500) % 6, np.arange(1500) % 5, here=here)
            one = np.zeros(1, dtype=np.int64)
            wrong = peer.fetch(spec, one, one + (1 << 41), one, out=poisoned(spec, 1), here=here)
            with pytest.raises(TransportError, match=r"anchors\[0\] is 2199023255552"):
                wrong.result(PATIENCE)
        spans = PackedSpec(name, table.schema, {"step": "step"})
        none, counts = np.zeros(2, dtype=np.int64), np.array([3, 2])
        out = np.zeros(spans.reply_bytes(2, 5), dtype=np.uint8)
        asked = peer.fetch(spans, none + 4, none, generations_of(table, none + 4), counts, out=out)
        assert not asked.result(PATIENCE).any()
        given = np.array([UNSET], dtype=np.float32), np.array([-1])
        for length in (1, 150):
            one = Rows.of(table.schema, rows(50 + length, length), "one")
            stored = peer.store(name, table.schema, [one], *given, here=here)
            slot = int(stored.result(PATIENCE)[0])
            update = Update(name, np.array([slot]), None, np.float32([7.5]), True)
            assert peer.ask(update, here=here).result(PATIENCE) == 0
            assert table._engine.reader().arrays.priority[slot] == 7.5
            assert numbers_of(table)[-1] == 50 + length
            table.remove(slot)
        assert b"free_steps" in peer.ask(Metadata("capacity", name), here=here).result(PATIENCE)


def test_large_messages_in_both_directions_do_not_wait_for_each_other(kind: Kind) -> None:
    """Answers to both never mix, though each may be sent in parts."""
    with named(max_steps=1 << 17, max_trajectories=64) as table:
        table.add(rows(0, 5))
        with served(kind, table) as (_, peer):
            spec = spec_of(table, {"value": gear.Window(3000)})
            zeros = np.zeros(50, dtype=np.int64)
            generations, given = np.repeat(generations_of(table, [0]), 50), (np.float32([-1]), np.array([-1]))

            def fetches() -> list[Any]:
                return [
                    peer.fetch(spec, zeros, zeros, generations, out=poisoned(spec, 50)) for _ in range(20)
                ]

            checked = Rows.of(table.schema, rows(1, 8000), "one")
            for _ in range(3):
                answers = fetches()
                answers += [peer.store(str(table.name), table.schema, [checked], *given) for _ in range(2)]
                for answer in [*answers, *fetches()]:
                    answer.result(PATIENCE)


def test_a_server_that_ends_and_another_one(kind: Kind) -> None:
    with six() as table, served(kind, table) as (first, _), served(kind, table) as (_, other):
        spec, addresses = spec_of(table), [other._address]
        ended = Serving(str(table.name), tls=kind.server)
        addresses.append(ended.loop.run(ended.server.listen(kind.name), PATIENCE))
        peer = first.peer(address=lambda: addresses[-1], tls=kind.client)
        check_fetch(peer, table, spec, [3, 1], [1, 2])
        addresses.pop()
        ended.close()
        for _ in range(3):
            with contextlib.suppress(TransportError):
                check_fetch(peer, table, spec, [3, 1], [1, 2])
                break
        check_fetch(peer, table, spec, [3, 1], [1, 2])
        peer.close()
        with pytest.raises(TransportError, match="has been closed"):
            check_fetch(peer, table, spec, [3, 1], [1, 2])

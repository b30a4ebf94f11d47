"""Who is served and who is not: secrets, versions, libraries, kinds out of turn, sizes, deadlines."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from table_common import forked, forks, named, rows
from transport_common import (
    HELLO,
    PATIENCE,
    SECRET,
    Serving,
    check_fetch,
    fetch_message,
    open_message,
    poisoned,
    serving,
    spec_of,
)
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import HandshakeError, PeerTimeoutError, RegionError, SchemaError, TransportError
from gear_loader.transport import Address, Limits, Peer, Server, connection
from gear_loader.transport import loop_link as links
from gear_loader.transport import socket as socket_channel
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.handlers import Reply
from gear_loader.transport.handshake import check_library, check_secret
from gear_loader.transport.wire import NONCE, VERSION, Header, Kind, pack_text

Shelf = tuple[gear.Table, Serving]
DIFFER = "The secrets differ. Give the same one to both sides."


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """A table and its server, which afterwards still serves those who know the secret."""
    with named() as table:
        table.extend([rows(i, 5 + i) for i in range(4)])
        limits = Limits(handshake=0.3, patience=0.4, rows=1000, store_bytes=1 << 16)
        with serving(str(table.name), limits=limits) as server:
            yield table, server
            fetch(server.peer(), table)


def fetch(peer: Peer, table: gear.Table) -> None:
    check_fetch(peer, table, spec_of(table), [3, 1], [2, 2])


def asking(peer: Peer, table: gear.Table) -> Any:
    none, spec = np.empty(0, dtype=np.int64), spec_of(table)
    return peer.fetch(spec, none, none, none, out=poisoned(spec, 0))


def refused(peer: Peer, table: gear.Table, message: str, error: type[Exception] = TransportError) -> str:
    """The error of asking for rows."""
    with pytest.raises(error, match=message) as found:
        asking(peer, table).result(PATIENCE)
    return str(found.value)


@contextlib.contextmanager
def played(play: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a server that plays this with its only connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work() -> None:
            connection, _ = listening.accept()
            with connection:
                play(connection)

        thread = threading.Thread(target=work)
        thread.start()
        yield f"socket://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(PATIENCE)


# ---------------------------------------------------------------- secrets, versions, libraries


def test_a_wrong_secret_is_refused_and_logged(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    table, server = shelf
    wrong = b"a wrong secret, as long"
    with caplog.at_level(logging.WARNING):
        said = refused(server.peer(secret=wrong), table, "refused the connection", HandshakeError)
    assert f"node b ({server.address}) refused the connection: The secrets differ." in said
    assert str(table.name) in said  # as the requester's own words
    assert "refused 127.0.0.1:" in caplog.text
    for secret in (wrong, SECRET):
        assert secret.decode() not in caplog.text + said


def test_a_server_without_the_secret_is_not_asked_for_anything(shelf: Shelf) -> None:
    """It plays the server as well as it can: it lets the requester prove itself, and makes up its own proof."""
    table, server = shelf
    heard: list[bytes] = []

    def play(connection: socket.socket) -> None:
        connection.recv(64 + len(HELLO), socket.MSG_WAITALL)
        small = pack_text("socket") + pack_text("socket") + bytes(range(NONCE))
        connection.sendall(Header(Kind.CHALLENGE, 0, len(small), 0).pack() + small)
        proof = connection.recv(64 + 32, socket.MSG_WAITALL)
        limits = Limits()
        sizes = {name: getattr(limits, name) for name in ("rows", "reply_bytes", "store_bytes", "specs")}
        welcome = messages.WELCOME.pack(proof=proof[64:], **sizes)  # its own proof, sent back
        connection.sendall(Header(Kind.WELCOME, 0, len(welcome), 0).pack() + welcome)
        heard.append(connection.recv(1000))

    with played(play) as address:
        peer = server.peer(address=address, name="a stranger")
        refused(peer, table, r"a stranger .* does not know the secret", HandshakeError)
    assert heard == [b""]


def test_a_proof_is_worth_nothing_on_another_connection(shelf: Shelf) -> None:
    _, server = shelf
    sent: list[bytes] = []

    class Recorder(socket.socket):
        def sendmsg(self, parts: Any, *more: Any) -> int:
            parts = list(parts)
            if self.getsockname()[1] != int(server.address.rpartition(":")[2]):
                sent.append(b"".join(bytes(part) for part in parts))
            return super().sendmsg(parts, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket_channel.socket, "socket", Recorder)
        server.peer().metadata("nothing", "nothing").exception(PATIENCE)
    hello, proof = (next(each for each in sent if each[10] == kind) for kind in (Kind.HELLO, Kind.PROOF))
    with server.raw() as raw:
        raw.socket.sendall(hello)
        raw.receive()
        raw.socket.sendall(proof)
        assert raw.text() == DIFFER


def test_an_invalid_secret_is_refused() -> None:
    secrets: list[Any] = [b"", b"fifteen bytes..", "text", "a text of more than 16 letters", None]
    for make in (check_secret, lambda secret: Server([], secret)):
        for secret in secrets:
            with pytest.raises(HandshakeError, match=r"at least 16 bytes, such as secrets.token_bytes\(32\)"):
                make(secret)


def test_versions_that_differ_name_each_other(shelf: Shelf) -> None:
    table, server = shelf
    with server.raw() as raw:
        raw.socket.sendall(Header(Kind.HELLO, 0, len(HELLO), 0).pack(version=9) + HELLO)
        assert f"speaks protocol version 9; this side speaks version {VERSION}" in raw.text()

    def other_version(connection: socket.socket) -> None:
        connection.recv(64 + len(HELLO), socket.MSG_WAITALL)
        connection.sendall(Header(Kind.CHALLENGE, 0, 0, 0).pack(version=9))

    def other_protocol(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 100)
        connection.recv(1000)

    for play, message in (
        (other_version, rf"node b .* speaks protocol version 9; this side speaks version {VERSION}"),
        (other_protocol, r"does not speak this protocol: A message begins with b'HTTP/1\.1'"),
    ):
        with played(play) as address:
            refused(server.peer(address=address), table, message, HandshakeError)


def test_libraries_that_differ_name_each_other(shelf: Shelf) -> None:
    table, server = shelf
    check_library("ucxx-0.52.0", "ucxx-0.53.1", peer="b")
    with pytest.raises(
        HandshakeError, match=r"b uses ucx-py-0\.45\.0, this side ucxx-0\.52\.0: the two are not compatible"
    ):
        check_library("ucxx-0.52.0", "ucx-py-0.45.0", peer="b")
    # What the address says is believed before anything is opened.
    peer = server.peer(address="socket://127.0.0.1:1?library=carrier-pigeon-2.0")
    refused(peer, table, r"uses carrier-pigeon-2\.0, this side socket", HandshakeError)
    for library, carrier, message in (
        ("ucx-py-0.45.0", "socket", "The requester uses ucx-py-0.45.0, this side socket"),
        ("socket", "ucx", "The requester asked for the carrier 'ucx'; this is 'socket'."),
    ):
        with server.raw() as raw:
            raw.send(Kind.HELLO, pack_text(library) + pack_text(carrier) + bytes(NONCE), request=0)
            assert raw.text().startswith(message)


# ---------------------------------------------------------------- the server against all who connect


def test_kinds_out_of_turn(shelf: Shelf) -> None:
    _, server = shelf
    for kind in set(Kind) - {Kind.HELLO}:
        with server.raw() as raw:
            raw.send(kind, b"", request=0)
            assert raw.text() == f"A message {kind.name} came during the handshake; expected HELLO."
    for kind in set(Kind) - {
        Kind.OPEN,
        Kind.FETCH,
        Kind.STORE,
        Kind.LEARN,
        Kind.METADATA,
        Kind.UPDATE,
        Kind.PART,
        Kind.FILL,
        Kind.SET,
        Kind.UNFILLED,
        Kind.ADVANCE,
        Kind.BYE,
    }:
        with server.proven() as raw:
            raw.send(kind)
            expected = f"A message {kind.name} came after the handshake; expected OPEN, FETCH, STORE"
            assert expected in raw.text()


def test_a_hello_is_checked(shelf: Shelf) -> None:
    cases = [
        (b"", "The length of library of a message HELLO takes 2 bytes; 0 are left"),
        (b"\xff\xff" + bytes(100), "library of a message HELLO has 65,535 bytes; expected at most 64"),
        (b"\x02\x00\xff\xff" + bytes(40), "library of a message HELLO is not UTF-8"),
        (HELLO[:-1], "nonce of a message HELLO takes 32 bytes; 31 are left"),
        (HELLO + b"x", "A message HELLO has 1 bytes too many"),
        (bytes(1000), "The small part of a message HELLO has 1,000 bytes; at most 164"),
    ]
    for small, message in cases:
        with shelf[1].raw() as raw:
            raw.send(Kind.HELLO, small, request=0)
            assert message in raw.text()


def test_a_request_is_checked_field_by_field(shelf: Shelf) -> None:
    table, server = shelf
    one, spec = [[1], [1], [1]], spec_of(table)
    cases: list[tuple[Kind, bytes, bytes, str]] = [
        (Kind.OPEN, b"", b"", "number of a message OPEN takes 4 bytes"),
        (Kind.OPEN, open_message(spec, 64), b"", "number of a message OPEN is 64; expected less than 64"),
        (Kind.OPEN, bytes(2 << 20), b"", "The small part of a message OPEN has 2,097,152 bytes"),
        (Kind.FETCH, b"abc", b"", "A message FETCH has 3 bytes; expected at least 8"),
        (Kind.FETCH, fetch_message(one), b"", "asks for the spec 0, which was not opened"),
        (Kind.FETCH, fetch_message(one, n=2), b"", "has n 2; expected at most 1,000, and 8 + 24 n bytes"),
        (Kind.FETCH, fetch_message(one, n=2**32 - 1), b"", "has n 4,294,967,295; expected at most 1,000"),
        (
            Kind.FETCH,
            fetch_message(np.zeros((3, 1001))),
            b"",
            "FETCH of 24,032 bytes has n 1,001; expected at most 1,000",
        ),
        (Kind.FETCH, fetch_message(one), b"x", "The bulk part of a message FETCH has 1 bytes"),
        (Kind.STORE, b"abc", b"", "n of a message STORE takes 4 bytes"),
        (Kind.STORE, bytes(8), bytes(1 << 17), "part of a message STORE has 131,072 bytes; at most 65,536"),
        (Kind.METADATA, b"\x05\x00ab", b"", "name of a message METADATA takes 5 bytes; 2 are left"),
        (Kind.BYE, b"x", b"", "The small part of a message BYE has 1 bytes; at most 0"),
    ]
    for kind, small, bulk, message in cases:
        with server.proven() as raw:
            raw.send(kind, small, bulk)
            assert message in raw.text()


def test_a_refused_spec_leaves_the_connection(shelf: Shelf) -> None:
    table, server = shelf
    spec = spec_of(table)
    with server.proven() as raw:
        raw.send(Kind.OPEN, b"\x00\x00\x00\x00[]")
        assert "expected table, columns and windows" in raw.error()
        raw.send(Kind.FETCH, fetch_message([[1], [1], [1]]))  # sent without waiting: the same answer
        assert "expected table, columns and windows" in raw.error()
        raw.send(Kind.OPEN, open_message(spec), request=7)
        header, small, _ = raw.receive()
        assert (header.kind, header.request, small) == (Kind.OPENED, 7, bytes(4))
        raw.send(Kind.FETCH, fetch_message([[99], [1], [1]]), request=8)
        header, small, bulk = raw.receive()
        assert (header.kind, header.request, small, len(bulk)) == (Kind.REPLY, 8, b"", spec.reply_bytes(1))
        raw.send(Kind.BYE)
        assert raw.is_closed()


def test_connections_that_stop_in_the_middle_are_cut(shelf: Shelf) -> None:
    table, server = shelf
    with server.raw() as silent, server.raw() as slow, server.proven() as idle, server.proven() as half:
        slow.socket.sendall(Header(Kind.HELLO, 0, len(HELLO), 0).pack() + HELLO[:5])
        half.socket.sendall(Header(Kind.OPEN, 1, 1000, 0).pack() + b"1234")
        assert silent.is_closed()
        assert slow.is_closed()
        assert half.is_closed()
        idle.send(Kind.OPEN, open_message(spec_of(table)))  # between messages there is no deadline
        assert idle.receive()[0].kind is Kind.OPENED
    with server.proven() as deaf:  # it takes no answer
        deaf.send(Kind.OPEN, open_message(spec_of(table)))
        deaf.socket.settimeout(0.2)
        with contextlib.suppress(OSError):  # its buffers are full, or it has cut already
            for _ in range(3000):
                deaf.send(Kind.FETCH, fetch_message(np.zeros((3, 1000))))
        wait_until(lambda: server.server.num_connections == 0)


def test_only_so_many_connections() -> None:
    with named() as table:
        table.extend([rows(i, 5 + i) for i in range(4)])
        with serving(str(table.name), limits=Limits(connections=2)) as server:
            hasty, peer = server.peer(timeout=2.0), server.peer()
            with server.proven(), server.proven(), server.raw() as silent:
                busy = r"the server is busy: it serves 2 connections, the most it accepts"
                refused(hasty, table, busy, PeerTimeoutError)
                waiting = asking(peer, table)  # with more time it tries until there is a place
                time.sleep(0.2)
                assert not waiting.done()
            waiting.result(PATIENCE)
            assert silent.socket.fileno() < 0
            fetch(peer, table)


def test_a_server_that_sends_nonsense_after_the_handshake(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, server = shelf
    real = connection._parts
    for kind, more, small, message in (
        (Kind.REPLY, 10**6, b"", "answers a request 1000000 that was not made"),
        (Kind.STORED, 0, b"", "A message STORED came; expected REPLY or ERROR"),
        (Kind.REPLY, 0, b"x", "has parts of 1 and"),
        (Kind.WELCOME, 0, b"", "A message WELCOME came; expected REPLY or ERROR"),
    ):

        def lie(request: int, reply: Reply, lies: Any = (kind, more, small)) -> Any:
            if reply.kind is Kind.REPLY:
                request, reply = lies[1] or request, Reply(lies[0], lies[2], reply.bulk)
            return real(request, reply)

        with monkeypatch.context() as patch:
            patch.setattr(connection.Connection, "_fetch_ahead", lambda *_: None)  # the task answers
            patch.setattr(connection, "_parts", lie)
            refused(server.peer(), table, message)


# ---------------------------------------------------------------- peers


def test_a_peer_is_made_of_sensible_things() -> None:
    with pytest.raises(TransportError, match="expected <carrier>://"):
        Peer("nowhere", secret=SECRET, timeout=1, name="b")
    for timeout in (0, -1, "1", float("nan"), float("inf")):
        with pytest.raises(SchemaError, match="expected a positive number of seconds"):
            Peer("socket://a:1", secret=SECRET, timeout=timeout, name="b")  # type: ignore[arg-type]
    with pytest.raises(RegionError, match="Table name"):
        Server(["../x"], SECRET)


@forks
def test_a_peer_does_not_survive_a_fork_nor_being_closed(shelf: Shelf) -> None:
    table, server = shelf
    peer = server.peer()
    fetch(peer, table)

    def work() -> None:
        with pytest.raises(TransportError, match=r"was made in process .*Make a Peer in each process"):
            peer.metadata("a", "b")
        peer.close()
        again = Peer(server.address, secret=SECRET, timeout=PATIENCE, name="b")
        error = again.metadata("a", str(table.name)).exception(PATIENCE)
        assert "has no metadata called 'a'" in str(error)

    forked(work)
    fetch(peer, table)
    peer.close()
    peer.close()
    refused(peer, table, "The peer node b has been closed")
    wait_until(lambda: server.server.num_connections == 0)


def test_an_address_that_cannot_be_had_or_is_invalid(shelf: Shelf) -> None:
    table, server = shelf
    answers: list[Any] = [KeyError("lost"), "nowhere", "ucx-and-more://a:1", server.address]

    def address() -> str:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return str(found)

    peer = server.peer(address=address)
    refused(peer, table, r"its address could not be had \(KeyError: 'lost'\)")
    refused(peer, table, "expected <carrier>://")
    refused(peer, table, "Carrier 'ucx-and-more'")
    fetch(peer, table)
    assert Address.parse(server.address).carrier == "socket"
    assert links._LONGEST < 1

"""Writers of a served table in processes of their own, and the bare carrier: a socket that takes as many bytes."""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

import numpy as np

import gear_loader as gear
from benchmarks.peers import online

PACKAGES = MODULES = ("numpy",)

_LENGTH = 8  # bytes of the number before each message


class Remote(online.Subject):
    """`RemoteTable`: its writer, and `extend`. address: the url of the table, and the secret."""

    modes = ("whole", "batches", "steps", "commits")
    several = True

    def open(self) -> None:
        url, secret = self.address
        self._remote = gear.connect(url, secret=secret.encode())
        self._several = [(batch, np.full(len(batch[self.source.mark]), self.steps)) for batch in self.batches]
        self._writer = self._remote.writer(wait=self.mode == "commits")
        self._items = self.rows() if self.mode == "steps" else [[one] for one in self.each]

    def work(self) -> int:
        if self.mode == "batches":
            return self._extend()
        append = self._writer.append
        for piece in self.next(self._items):
            append(piece)
        self._writer.commit()
        return self.steps if self.mode == "steps" else 1

    def _extend(self) -> int:
        batch, lengths = self.next(self._several)
        self._remote.extend(batch, lengths=lengths)
        return len(lengths)

    def fill(self) -> None:
        done = 0 if self.number == 0 else self.room
        while done < self.room:
            done += self._extend()

    def finish(self) -> None:
        self._remote.flush()

    def check(self) -> None:
        """The other side looks into the table."""

    def close(self) -> None:
        self._remote.close()


class Carrier(online.Subject):
    """A socket that sends as many bytes, in one piece a trajectory or a batch, to a process that only receives them.

    The receiver answers each piece by one byte. As writers do, it waits for the answers at the end; for batches, and in
    the mode "commits", for each of them.
    """

    modes = ("whole", "batches", "steps", "commits")
    several = True

    def open(self) -> None:
        self._receiver = None
        host = self.spec.get("host", "127.0.0.1")
        if self.address is None:
            listener = socket.create_server((host, 0), backlog=64)
            self.address = listener.getsockname()[1]
            fork = multiprocessing.get_context("fork")
            self._receiver = fork.Process(target=_receive_all, args=(listener,), daemon=True)
            self._receiver.start()
            listener.close()
        self._socket = socket.create_connection((host, self.address))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unanswered = 0
        parts = self.batches if self.mode == "batches" else self.each
        self._messages = [b"".join(values.tobytes() for values in part.values()) for part in parts]
        self._count = len(self.batches[0][self.source.mark]) if self.mode == "batches" else 1

    def work(self) -> int:
        message = self.next(self._messages)
        self._socket.sendall(len(message).to_bytes(_LENGTH, "little"))
        self._socket.sendall(message)
        self._unanswered += 1
        if self.mode in ("batches", "commits"):
            self.finish()
        return self.steps if self.mode == "steps" else self._count

    def fill(self) -> None:
        """Nothing is kept."""

    def finish(self) -> None:
        while self._unanswered:
            self._unanswered -= len(self._socket.recv(self._unanswered))

    def check(self) -> None:
        self.work()
        self.finish()

    def close(self) -> None:
        self._socket.close()
        if self._receiver is not None:
            self._receiver.terminate()
            self._receiver.join()


def _receive_all(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            _receive(connection)
            os._exit(0)
        connection.close()


def _receive(connection: socket.socket) -> None:
    """Receive messages until the other side closes."""
    head, memory = memoryview(bytearray(_LENGTH)), memoryview(bytearray())
    while _fill(connection, head):
        size = int.from_bytes(head, "little")
        if size > len(memory):
            memory = memoryview(bytearray(size))
        if not _fill(connection, memory[:size]):
            return
        connection.sendall(b"\0")


def _fill(connection: socket.socket, memory: memoryview) -> bool:
    done = 0
    while done < len(memory):
        count = connection.recv_into(memory[done:])
        if not count:
            return False
        done += count
    return True


KINDS: dict[str, dict[str, Any]] = {"online": {"ours": Remote, "carrier": Carrier}}

"""How other processes read a table's blocks in the memory of a GPU: their owner copies what they ask for to the host.

The owner listens at a Unix socket of the abstract namespace, called after the table's file. A process that reads hands
over some memory of its own (a memfd), again when it needs more. A request is a message with three numbers, and the rest
lies in that memory; the answer is "done", or says what is wrong:

    ids     int32 [b], blocks of the spans, one span after another
    first   int64 [n], counts int64 [n]: first step of each span in its trajectory, and number of steps, at least 1
    names   int64 [c], columns, by their places in the schema
    rows    of each of these columns the rows of all spans, one after another

Each part begins at a multiple of 8 bytes. The process that reads holds a read ticket, so nobody reuses the blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gear_loader.errors import RegionError
from gear_loader.native import copying
from gear_loader.storage.device_memory import DeviceMemory
from gear_loader.storage.layout import Layout
from gear_loader.storage.lock import LOCK_TIMEOUT
from gear_loader.utils.arrays import Array, data_address
from gear_loader.utils.background import background_thread
from gear_loader.utils.mutex import new_mutex

PIECE_BYTES = 64 << 20
"""Bytes of the rows of one request, or those of one span."""
_NUMBERS = struct.Struct("<3q")
_ANSWER_BYTES = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_CREDENTIALS = struct.Struct("3i")  # of `SO_PEERCRED`: pid, uid, gid


def _address(key: tuple[int, int]) -> bytes:
    return b"\0gear-loader-%x-%x" % key


def _is_own(peer: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    given = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(given)[1] == os.geteuid())


class _Requested(NamedTuple):
    """The parts of a request in memory; `rows` is where those of the columns begin."""

    ids: Array
    first: Array
    counts: Array
    names: Array
    rows: int

    @classmethod
    def of(cls, memory: Array, blocks: int, spans: int, names: int) -> _Requested:
        """Those of memory, uint8 [bytes]; raises ValueError if there is too little."""
        ends = np.cumsum([0, -(-blocks // 2) * 8, spans * 8, spans * 8, names * 8])
        if min(blocks, spans, names) < 0 or ends[-1] > len(memory):
            raise ValueError(f"{blocks} blocks, {spans} spans and {names} columns in {len(memory)} bytes")
        ids, *others = np.split(memory[: ends[-1]], ends[1:-1])
        first, counts, columns = (part.view(np.int64) for part in others)
        return cls(ids.view(np.int32)[:blocks], first, counts, columns, int(ends[-1]))


def _row_places(layout: Layout, names: Sequence[str], steps: int, begin: int) -> Array:
    """First byte of each column's rows, and the end of the last, int64 [c + 1], of so many steps."""
    sizes = [-(-layout.columns[name].step_bytes * steps // 8) * 8 for name in names]
    return begin + np.cumsum([0, *sizes])


class BlockClient:
    """Reads blocks that lie in another process's memory on a GPU, as `DeviceMemory.read` does. Several threads may.

    Args:
        layout: of the table. key: of its file, device and inode. name: of the table.
    """

    def __init__(self, layout: Layout, key: tuple[int, int], name: str) -> None:
        self._layout, self._key, self._name = layout, key, name
        self._mutex = new_mutex()
        self._pid = os.getpid()
        self._owner: socket.socket | None = None
        self._memory: mmap.mmap | None = None

    def connect(self) -> None:
        """Connect to the owner, if it is there.

        Raises:
            RegionError: it is not.
        """
        if self._owner is not None:
            return
        owner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            owner.settimeout(LOCK_TIMEOUT)
            owner.connect(_address(self._key))
            if not _is_own(owner):
                raise OSError(errno.EPERM, "the socket is another user's")
        except OSError as error:
            owner.close()
            raise self._absence() from error
        except BaseException:
            owner.close()
            raise
        self._owner = owner

    def close(self) -> None:
        """Leave the owner; idempotent."""
        owner, self._owner, self._memory = self._owner, None, None
        if owner is not None:
            owner.close()

    def _absence(self) -> RegionError:
        return RegionError(
            f"The blocks of table {self._name!r} were in the memory of {self._layout.device}, and the process that had "
            "them has ended or closed the table, or is in another network namespace. Remove what is left with "
            f"`gear-loader rm {self._name}`; what was saved, or written to a disk, comes back by Table.load or "
            "Table.recover."
        )

    def read(self, ids: Array, first: Array, counts: Array, outs: Mapping[int, Mapping[str, Array]]) -> None:
        """As `DeviceMemory.read`.

        Raises:
            RegionError: the owner has ended, does not answer, or cannot read.
        """
        places = {name: addresses for names in outs.values() for name, addresses in names.items()}
        size = self._layout.block_steps
        ends = np.cumsum(-(-(first + counts) // size) - first // size)
        row_bytes = sum(self._layout.columns[name].step_bytes for name in places)
        parts = np.cumsum(counts * row_bytes) // PIECE_BYTES
        begin = low = 0
        for high in [*(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(first)]:
            if high > low:
                end, some = int(ends[high - 1]), {name: each[low:high] for name, each in places.items()}
                self._read(ids[begin:end], first[low:high], counts[low:high], some)
                begin, low = end, high

    def _read(self, ids: Array, first: Array, counts: Array, places: Mapping[str, Array]) -> None:
        layout, names, steps = self._layout, list(self._layout.schema), int(counts.sum())
        numbers = len(ids), len(first), len(places)
        begin = 8 * (-(-numbers[0] // 2) + 2 * numbers[1] + numbers[2])
        rows = _row_places(layout, list(places), steps, begin)
        if self._pid != os.getpid():
            # A forked child, to which connection and mutex of the parent are of no use.
            self._mutex, self._pid = new_mutex(), os.getpid()
            self.close()
        with self._mutex:
            self.connect()
            memory = self._room(int(rows[-1]))
            parts = _Requested.of(memory, *numbers)
            parts.ids[:], parts.first[:], parts.counts[:] = ids, first, counts
            parts.names[:] = [names.index(name) for name in places]
            self._ask(numbers)
            begins = np.cumsum(counts) - counts
            for (name, addresses), row in zip(places.items(), rows.tolist(), strict=False):
                step = layout.columns[name].step_bytes
                column = np.array([data_address(memory) + row, 0, step, step, 1 << 40])  # all in one block
                copying.copy_spans(column, begins, counts, np.ascontiguousarray(addresses))

    def _room(self, count: int) -> Array:
        """Memory for a request, uint8 [bytes]; new memory is handed over."""
        assert self._owner is not None
        if self._memory is None or len(self._memory) < count:
            count = max(count + count // 2, 1 << 16)
            file = os.memfd_create("gear-loader", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(file, count)
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
                memory = mmap.mmap(file, count)
                self._told(lambda owner: socket.send_fds(owner, [b"memory"], [file]))
            finally:
                os.close(file)
            self._memory = memory
        return np.frombuffer(self._memory, dtype=np.uint8)

    def _ask(self, numbers: tuple[int, int, int]) -> None:
        """Let the owner fill in the rows of a request; raises RegionError."""
        self._told(lambda owner: owner.send(_NUMBERS.pack(*numbers)))

    def _told(self, send: Callable[[socket.socket], object]) -> None:
        """Send a message, and wait for the answer; raises RegionError."""
        owner = self._owner
        assert owner is not None
        try:
            send(owner)
            answer = owner.recv(_ANSWER_BYTES)
        except TimeoutError as error:
            self.close()
            raise RegionError(
                f"The process that holds the blocks of table {self._name!r} in the memory of {self._layout.device} "
                f"has not answered for {LOCK_TIMEOUT:g} s; perhaps it is stopped."
            ) from error
        except OSError as error:
            self.close()
            raise self._absence() from error
        except BaseException:  # an answer may come that nobody waits for
            self.close()
            raise
        if not answer:
            self.close()
            raise self._absence()
        if answer != b"done":
            raise RegionError(
                f"Blocks of table {self._name!r} cannot be read: {answer.decode(errors='replace')}"
            )


class BlockServer:
    """Copies blocks on a GPU to processes that ask for them, in one thread.

    Args:
        memory: the blocks. layout: of the table. key: as for `BlockClient`.

    Raises:
        OSError: no socket can be made.
    """

    def __init__(self, memory: DeviceMemory, layout: Layout, key: tuple[int, int]) -> None:
        self._memory, self._layout = memory, layout
        self._names = list(layout.schema)
        self._readers: dict[socket.socket, mmap.mmap | None] = {}
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(_address(key))
            self._listener.listen(128)
            background_thread(self._run, "gear-loader-blocks", stop=self.close).start()
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        """End the thread, which closes all connections. Does not wait."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Close the descriptors in a forked child: the parent goes on."""
        for each in (self._listener, *self._readers):
            each.close()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._closed:
                sockets = {each.fileno(): each for each in (self._listener, *self._readers)}
                poll = select.poll()
                for number in sockets:
                    poll.register(number, select.POLLIN)
                for number, _ in poll.poll():
                    if self._closed:
                        break
                    if sockets[number] is self._listener:
                        self._accept()
                    else:
                        self._serve(sockets[number])
        finally:
            self.leave()
            self._readers.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            reader = self._listener.accept()[0]
            if _is_own(reader):
                reader.settimeout(LOCK_TIMEOUT)
                self._readers[reader] = None
            else:
                reader.close()

    def _serve(self, reader: socket.socket) -> None:
        """Answer one message, or let the reader go."""
        files: list[int] = []
        try:
            message, files = socket.recv_fds(reader, _NUMBERS.size, 1)[:2]
            if files:
                if fcntl.fcntl(files[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                    raise ValueError("memory that may become smaller")
                self._readers[reader] = mmap.mmap(files[0], os.fstat(files[0]).st_size)
            elif message:
                given = self._readers[reader]
                if given is None:
                    raise ValueError("no memory was handed over")
                self.answer(np.frombuffer(given, dtype=np.uint8), _NUMBERS.unpack(message))
            else:
                raise EOFError
            reader.send(b"done")
        except (OSError, EOFError):
            del self._readers[reader]
            reader.close()
        except Exception as error:
            with contextlib.suppress(OSError):
                reader.send((str(error) or type(error).__name__).encode()[:_ANSWER_BYTES])
        finally:
            for file in files:
                os.close(file)

    def answer(self, memory: Array, numbers: tuple[int, int, int]) -> None:
        """Fill in the rows of a request in memory, uint8 [bytes]. Waits for the GPU.

        Raises:
            ValueError: the request is invalid. RegionError: as `DeviceMemory`.
        """
        layout, parts = self._layout, _Requested.of(memory, *numbers)
        # Copies: the other process may change what has been checked.
        ids, first, counts, which = (part.copy() for part in parts[:4])
        if not len(first) or not len(which):
            return
        if not 0 <= which.min() <= which.max() < len(self._names):
            raise ValueError(f"columns {which.tolist()} of {len(self._names)}")
        names, most = [self._names[i] for i in which.tolist()], layout.max_steps + 1
        if any(layout.schema[name].trajectory for name in names):
            most = 1
        inside = first.min() >= 0 and counts.min() >= 1 and max(first.max(), counts.max()) <= most
        if not inside or (first + counts).max() > most:
            raise ValueError(f"spans of steps that are not in 0 to {most - 1}")
        blocks = int((-(-(first + counts) // layout.block_steps) - first // layout.block_steps).sum())
        if len(ids) != blocks or not layout.host_blocks <= ids.min() <= ids.max() < layout.num_blocks:
            raise ValueError(f"{len(ids)} blocks, of {layout.writable_blocks}, for spans of {blocks}")
        rows = _row_places(layout, names, int(counts.sum()), parts.rows)
        if rows[-1] > len(memory):
            raise ValueError(f"{rows[-1]} bytes of rows in {len(memory)}")
        outs, begins = dict[int, dict[str, Array]](), np.cumsum(counts) - counts
        for name, row in zip(names, rows.tolist(), strict=False):
            column = layout.columns[name]
            addresses = data_address(memory) + row + begins * column.step_bytes
            outs.setdefault(column.base, {})[name] = addresses
        self._memory.read(ids, first, counts, outs)

"""Owners in other processes and readers of them by NIXL: for tests over TCP and shared memory, and over verbs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from gather_common import PADS, Spec, windows_of
from waiting_common import PATIENCE, SLOWER, go_on

from gear_loader.collection import windows as collected
from gear_loader.errors import TransportError
from gear_loader.native import gathering
from gear_loader.storage.schema import Column, Schema, Window
from gear_loader.storage.table import Table
from gear_loader.transport.nixl_reader import NixlPeer
from gear_loader.transport.nixl_server import NixlOwner
from gear_loader.transport.spec import WindowSpec

DEREGISTER = "deregister "  # before the name of a table, in a question to an owner
CONTEXT = multiprocessing.get_context("forkserver")
COLUMNS = {"x": Column(torch.float32, (5,)), "flag": Column(torch.bool), "big": Column(torch.uint8, (300,))}
COLUMNS["task"] = Column(torch.int16, (3,), per="trajectory")
SCHEMA = Schema(COLUMNS)


def windows_on(windows: dict[str, Window]) -> dict[str, Any]:
    """These, and what a trajectory has once."""
    return collected.windows_of(SCHEMA, {**windows, "task": None}, None)


WINDOWS = windows_on({"x": Window(6, -3), "flag": Window(6, -3, "head"), "big": Window(6, -3)})
Array = np.ndarray[Any, Any]


def steps(length: int, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(length, 5)).astype(np.float32),
        "flag": random.integers(0, 2, length).astype(bool),
        "big": random.integers(0, 256, (length, 300), dtype=np.uint8),
        "task": random.integers(-999, 999, 3).astype(np.int16),
    }


def make(name: str, seed: int = 0) -> tuple[Table, dict[int, dict[str, Array]]]:
    """A table of trajectories of 1 to 25 steps in blocks of 4."""
    table = Table.create(COLUMNS, max_steps=600, max_trajectories=40, block_steps=4, name=name)
    held = {}
    for i in range(20):
        rows = steps(1 + (7 * i) % 25, seed + i)
        held[table.add(rows)] = rows
    return table, held


def _deregister(owner: NixlOwner, table: str) -> None:
    """Take a table's memory away from the readers, as nothing in the package does while it is served."""
    region = owner._attached[owner._current[table]].engine.region
    assert region.bytes is not None
    listed = np.array([[region.bytes.ctypes.data, region.layout.region_bytes, 0]], dtype=np.uint64)
    owner._agent.deregister_memory(owner._agent.get_reg_descs(listed, "DRAM"))


def _own(pipe: Any, names: tuple[str, ...], environment: dict[str, str]) -> None:
    os.environ.update({"UCX_WARN_UNUSED_ENV_VARS": "n"} | environment)
    owner = NixlOwner(names)
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            table = pipe.recv()
            try:
                if table.startswith(DEREGISTER):
                    _deregister(owner, table.removeprefix(DEREGISTER))
                pipe.send(owner.metadata(table.removeprefix(DEREGISTER)))
            except Exception as error:
                pipe.send(error)
    owner.close()


class Owner:
    """A process that owns, asked through a pipe; what `NixlPeer` asks of a `Peer`."""

    def __init__(self, *names: str, **environment: str) -> None:
        self.names, self.asked, self.environment = names, 0, environment
        self.start()

    def start(self) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_own, args=(theirs, self.names, self.environment))
        self.process.start()
        theirs.close()
        assert self.pipe.poll(60 * SLOWER)
        assert self.pipe.recv() == "ready"

    def metadata(self, name: str, table: str) -> Future[bytes]:
        assert name == "nixl"
        self.asked += 1
        future: Future[bytes] = Future()
        try:
            self.pipe.send(table)
            if self.pipe.poll(10 * SLOWER):
                answer = self.pipe.recv()
                (future.set_exception if isinstance(answer, Exception) else future.set_result)(answer)
        except (OSError, EOFError) as error:
            future.set_exception(TransportError(str(error)))
        return future

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def end(self) -> None:
        self.pipe.close()
        if self.process.exitcode is None:
            go_on(self.process.pid or 0)
            self.process.join(5 * SLOWER)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


class World:
    """A table, its owner in another process, and a reader."""

    def __init__(self, name: str, owner: Owner) -> None:
        self.table, self.held = make(name)
        self.owner = owner
        self.peer = NixlPeer(owner, timeout=20.0 * SLOWER, name="node b")
        self.spec = WindowSpec(name, SCHEMA, WINDOWS)

    def rows(self, slots: Any, anchors: Any) -> tuple[tuple[Array, Array, Array], dict[str, Array]]:
        """What `fetch` takes, as selection's exchange brings it along."""
        slots, anchors = np.asarray(slots, dtype=np.int64), np.asarray(anchors, dtype=np.int64)
        region, (first, last, once) = self.table._engine.region, collected.reach_of(SCHEMA, self.spec.windows)
        extent = np.empty((len(slots), 3), np.int64)
        ids = np.full((len(slots), (last - first) // 4 + 2 + once), -1, np.int32)
        held, block_ids = region.array("extent"), region.array("block_ids").reshape(-1)
        blocks = region.layout.num_blocks
        gathering.resolve(slots, anchors, held, block_ids, 4, first, last, extent, ids, blocks, once)
        return (slots, anchors, region.array("generation")[slots]), {"extent": extent, "block_ids": ids}

    def start(self, slots: Any, anchors: Any) -> tuple[Future[Array], Array]:
        rows, index = self.rows(slots, anchors)
        out = np.full(self.spec.reply_bytes(len(rows[0])), 205, dtype=np.uint8)
        return self.peer.fetch(self.spec, *rows, out=out, **index), out

    def fetch(self, slots: Any, anchors: Any) -> tuple[Array, Array]:
        future, out = self.start(slots, anchors)
        return future.result(PATIENCE), out

    def check(self, slots: Any, anchors: Any) -> None:
        status, out = self.fetch(slots, anchors)
        assert not status.any()
        self.compare(out, slots, anchors)

    def compare(self, out: Array, slots: Any, anchors: Any, gone: tuple[int, ...] = ()) -> None:
        expected = naive(self.spec, self.held, slots, anchors, gone)
        for piece in self.spec.pieces(len(slots)):
            found = out[piece.offset : piece.offset + len(slots) * piece.row_bytes]
            assert (found == expected[piece.name, piece.kind]).all(), piece

    def close(self) -> None:
        self.peer.close()
        self.table.unlink()
        self.table.close()


def naive(
    spec: WindowSpec, held: dict[int, dict[str, Array]], slots: Any, anchors: Any, gone: tuple[int, ...]
) -> dict[tuple[str, str], Array]:
    """Every piece of the reply as bytes; rows that are gone are zeros."""
    found = {}
    rows = [torch.as_tensor(np.asarray(part, dtype=np.int64)) for part in (slots, anchors)]
    for name, window in spec.windows.items():
        once = SCHEMA[name].trajectory  # the window lies before the first step, at any anchor
        stored = {slot: held[slot][name][None] if once else held[slot][name] for slot in set(slots)}
        stored = {slot: part.reshape(len(part), -1).view(np.uint8) for slot, part in stored.items()}
        pad = PADS[("keep", "head", "tail", "edge").index(window.pad)]
        size = spec.schema[name].step_bytes
        both = windows_of(stored, Spec(size, window.length, window.offset, pad), *rows)
        for kind, values in zip(("column", "mask"), both, strict=True):
            values[list(gone)] = 0
            found[name, kind] = values.view(np.uint8).reshape(-1)
    return found

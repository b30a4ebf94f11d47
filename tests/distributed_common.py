"""Several ranks as processes of this machine, over gloo."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from options_common import nested_table

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.distributed.remote import RemoteShard
from gear_loader.transport.queries import open_query
from gear_loader.transport.table_cache import TableCache

SCHEMA = {
    "obs": gear.Column(torch.float32, (3,)),
    "act": gear.Column(torch.int64),
    "task": gear.Column(torch.int64, (2,), per="trajectory"),
    "flag": gear.Column(torch.uint8, (5,)),
}


def trajectory(number: int, length: int) -> dict[str, np.ndarray[Any, Any]]:
    """One whose every value tells its number and step."""
    steps = np.arange(length)
    return {
        "obs": (number + steps[:, None] / 64 + np.zeros(3)).astype(np.float32),
        "act": number * 1000 + steps,
        "flag": ((number + steps[:, None]) % 251 + np.zeros(5)).astype(np.uint8),
        "task": np.array([number, -number]),
    }


def check_batch(batch: dict[str, Any], windows: gear.Window) -> None:
    """Every row is a window of one trajectory, where its mask and anchor say."""
    mask, anchor = batch["mask"], batch["anchor"]
    mask = mask["act"] if isinstance(mask, dict) else mask  # of a mapping of windows, which are alike
    steps = anchor[:, None] + windows.offset + torch.arange(windows.length)
    numbers = batch["act"] // 1000
    for row in range(len(anchor)):
        there = mask[row]
        assert there.any()
        number = numbers[row][there][0]
        assert batch["task"][row].tolist() == [number, -number]
        assert torch.equal(batch["act"][row][there], number * 1000 + steps[row][there])
        assert not batch["act"][row][~there].any()
        expected = number + steps[row][there][:, None] / 64 + torch.zeros(3)
        assert torch.equal(batch["obs"][row][there], expected.float())
        assert torch.equal(
            batch["flag"][row][there], ((number + steps[row][there][:, None]) % 251 + torch.zeros(5)).byte()
        )


def new_priorities(batch: dict[str, Any], number: int) -> torch.Tensor:
    """Some that a row's name and the batch's number decide, so that it does not matter who gives them."""
    return ((batch["index"] * 7 + batch["anchor"] * 3 + batch["shard"] * 5 + number) % 11 + 0.25).float()


def same_rows(parts: list[list[dict[str, Any]]], whole: list[dict[str, Any]], name: str) -> None:
    """The batches of ranks, one after another, are those of one process."""
    for number, expected in enumerate(whole):
        for key, values in expected.items():
            together = np.concatenate([part[number][key] for part in parts])
            np.testing.assert_array_equal(together, values, err_msg=f"{name}, batch {number}, {key}")


def filled(name: str | None, shard: int, counts: list[int], **options: Any) -> gear.Table:
    """A shard's table, in which trajectory number 100 * shard + i is the i-th."""
    options = {"max_steps": 4000, "max_trajectories": 100, "block_steps": 8} | options
    table = gear.Table.create(SCHEMA, **nested_table({"name": name, **options}))
    for i in range(counts[shard]):
        number = 100 * shard + i
        table.add(trajectory(number, number * 7 % 23 + 1), priority=number % 5 + 0.5)
    return table


def on_two_nodes(
    table: gear.Table,
    rank: int,
    world: int,
    work: Callable[[Shards, int, int], Any],
    transport: str = "socket",
) -> Any:
    """What the work of a rank returns, over shards of which the first two are on one node; unlinks the table."""
    try:
        shards = Shards(table, timeout=60, transport=transport, node=f"node-{rank // 2}")
        try:
            found = work(shards, rank, world)
            shards.exchange.barrier()
        finally:
            shards.close()
        return found
    finally:
        table.unlink()


def run_ranks(
    world: int,
    work: Callable[..., Any],
    *args: Any,
    timeout: float = 240.0,
    dies: tuple[int, ...] = (),
    method: str = "forkserver",
) -> list[Any]:
    """Call ``work(rank, world, *args)`` in as many processes that have a process group, and return what they return.

    Args:
        dies: ranks that are expected to be killed; they return None.
        method: "spawn" makes them children of this process; the default starts them from one that has loaded torch.
    """
    context = mp.get_context(method)
    end = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_run, args=(rank, world, folder, pipes[rank][1], work, args))
            for rank in range(world)
        ]
        answers: dict[int, Any] = {}
        try:
            for process, (_, writer) in zip(processes, pipes, strict=True):
                process.start()
                writer.close()
            for rank, (reader, _) in enumerate(pipes):
                assert reader.poll(max(0.0, end - time.monotonic())), f"rank {rank}: nothing in {timeout} s"
                try:
                    error, answers[rank] = reader.recv()
                except EOFError:  # it was killed
                    assert rank in dies, f"rank {rank} ended without a result"
                    error, answers[rank] = None, None
                assert error is None, f"rank {rank}:\n{error}"
                if answers[rank] is not None:
                    answers[rank] = torch.load(io.BytesIO(answers[rank]), weights_only=False)
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process, (reader, _) in zip(processes, pipes, strict=True):
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
                reader.close()
    return [answers[rank] for rank in range(world)]


def _run(rank: int, world: int, folder: str, pipe: Any, work: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(folder) / "store"), world)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        value = work(rank, world, *args)
        answer = io.BytesIO()
        torch.save(value, answer)  # tensors by value: their process ends
        pipe.send((None, answer.getvalue()))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise


class Server:
    """Answers as a server does, out of a table of this process to which something happens before."""

    def __init__(self, table: gear.Table, happen: Callable[[], None]) -> None:
        self.tables, self._happen = TableCache([str(table.name)], 5.0), happen
        self._queries: dict[int, Any] = {}

    def fetch(self, spec: Any, *given: Any, out: Any, here: bool = False) -> Any:
        self._happen()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        query = self._queries.setdefault(id(spec), open_query(spec, self.tables))
        asked, status, size = spec.checked(given, out)
        reply = np.full(size + 128, 7, dtype=np.uint8)
        reply = reply[-reply.ctypes.data % 128 :][:size]
        query.read(query.table(), asked, reply, at_once=False)
        out[:size] = reply
        future.set_result(out[status : status + len(given[0])])
        return future


@contextlib.contextmanager
def one_far(
    far: gear.Table, near: gear.Table, happen: Callable[[], Any], cache: str | None = None
) -> Iterator[Shards]:
    """Shards of which the second is of another node."""
    server = Server(far, happen)
    with Shards([near, far], cache=cache) as shards, contextlib.closing(server.tables):
        shards._sources[1] = RemoteShard(server, str(far.name), far.schema)
        shards.remote = True
        try:
            yield shards
        finally:
            far.unlink()

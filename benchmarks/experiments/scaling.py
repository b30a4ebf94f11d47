"""``python -m benchmarks scaling``: what a batch's selection costs with so many ranks; docs/scaling.md explains it.

Three parts, added up:

work      what one rank computes, in processor time. Measured here: `GlobalSelection` draws batches as one of W ranks,
          and what the others would send is made up by `Played`; the time that this takes does not count.
messages  bytes of the messages. Computed by the functions that make them (`message_bytes`, `Exchange`'s head).
network   what it takes to exchange them. Computed from a cost a message, alpha, and a cost a byte, beta. Those of the
          loopback device are fitted to the rows of ``multi-server``; of others they are assumed, see `NETWORKS`.

An exchange is simulated round by round, as one of the ranks sees it (all are alike). Where ranks share cores, a message
costs their processor time one after another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

import gear_loader as gear
from benchmarks.harness import RESULTS
from benchmarks.nodes import ranks
from benchmarks.showing import grid, size
from gear_loader.distributed import rank_exchange as exchanges
from gear_loader.distributed import records
from gear_loader.distributed.global_selection import GlobalSelection
from gear_loader.distributed.node_routes import NodeRoutes
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.records import SUMMARY, UPDATE, Outbox, record_dtype
from gear_loader.distributed.remote import PART_BYTES
from gear_loader.distributed.slices import by_node, contiguous
from gear_loader.distributed.state_parts import gather, part_of_rank
from gear_loader.distributed.topology import MeshCoordinates
from gear_loader.selection.base import SelectionContext
from gear_loader.selection.samplers import Draw

Array = np.ndarray[Any, Any]

WORLDS = (2, 8, 32, 64, 128, 256, 512, 1024)
SELECTORS = {name: make() for name, make in ranks.SELECTORS.items()}
MERGED = ("prioritized, without replacement", "top")
_SHARD = 100_000  # trajectories of a shard, where only their number counts
_MORE, _MARGIN = 32, 1.5  # candidates of a shard, as `CandidateDrawing` asks for them


@dataclasses.dataclass(frozen=True)
class Network:
    """What a message costs.

    alpha: seconds of a message, on the side that waits longer; beta: of a byte; start: of any exchange. cores: that the
    ranks of this exchange share; None if each has its own.
    """

    alpha: float
    beta: float
    cores: int | None = None
    start: float = 0.0


NETWORKS = {
    # Gloo is what `Exchange` uses: sockets, whose cost a message is that of the system's network stack.
    "100 GbE, sockets": Network(15e-6, 1 / 12.5e9),
    "InfiniBand HDR, sockets (IPoIB)": Network(15e-6, 1 / 25e9),
    # Latencies of a message by the adapter itself: what another backend than gloo could reach.
    "InfiniBand HDR, verbs": Network(1.5e-6, 1 / 25e9),
    "InfiniBand NDR, verbs": Network(1.2e-6, 1 / 50e9),
}
"""Assumed, not measured: bandwidths are the nominal ones of one port."""


MEMORY = Network(1e-6, 1 / 10e9)
"""Between ranks of one node, where an exchange is hierarchical. Assumed."""

Round = tuple[float, float, bool]


def rounds(algorithm: str, world: int, each: float, group: int = 8) -> list[Round]:
    """What the busiest rank does to give every rank `each` bytes, round by round."""
    if algorithm == "pairwise":
        return [(world - 1, (world - 1) * each, False)]
    if algorithm == "bruck":
        steps = math.ceil(math.log2(world)) if world > 1 else 0
        return [(1, each * sum(rank >> step & 1 for rank in range(world)), False) for step in range(steps)]
    group = min(group, world)
    nodes = math.ceil(world / group)
    if algorithm == "one copy a node":
        steps = math.ceil(math.log2(nodes))
        between = [(1, each * group * min(2**step, nodes - 2**step), False) for step in range(steps)]
        return [(group - 1, (group - 1) * each, True), *between, (1, world * each, True)]
    assert (
        algorithm == "hierarchical"
    )  # as `NodeRoutes` does it, by sockets also within a node; first sizes of parts
    inside = (group - 1, (group - 1) * world * each / group, False)
    between = (2 * math.ceil(nodes / group) - 1, (world - group) * each, False)
    return [(group - 1, (group - 1) * 16 * world, False), inside, between, inside]


def seconds(network: Network, world: int, schedule: Sequence[Round]) -> float:
    """Time of a schedule of `rounds`."""
    share = 1.0 if network.cores is None else max(1.0, world / network.cores)
    total = network.start
    for messages, count, inside in schedule:
        used = MEMORY if inside else network
        total += share * (messages * used.alpha + count * used.beta)
    return total


@dataclasses.dataclass(frozen=True)
class Fit:
    """The loopback device as the rows have it; (world, bytes from each to each, measured and fitted seconds)."""

    network: Network
    points: list[tuple[int, int, float, float]]


def fit(rows: Iterable[Mapping[str, Any]]) -> Fit | None:
    """Fit start, alpha and beta to the rows of the collective alone, by relative errors; None without any."""
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for row in rows:
        if row["experiment"] == "multi-server" and row["workload"] == "all_to_all":
            key = (row["parameters"]["world"], row["parameters"]["each_bytes"])
            found[key] = (row["seconds"]["p50"], row["machine"]["cores"])
    if len(found) < 3:
        return None
    cores = next(iter(found.values()))[1]
    worlds, each = np.array(list(found)).T
    taken = np.array([value for value, _ in found.values()])
    share = np.maximum(1.0, worlds / cores) * (worlds - 1)
    terms = np.stack((np.ones(len(taken)), share, share * each), axis=1)
    kept = list(range(3))
    while True:  # what comes out negative is left out
        answer = np.zeros(3)
        answer[kept] = np.linalg.lstsq(terms[:, kept] / taken[:, None], np.ones(len(taken)), rcond=None)[0]
        if (answer >= 0).all():
            break
        kept = [place for place in kept if answer[place] >= 0]
    network = Network(float(answer[1]), float(answer[2]), cores, float(answer[0]))
    fitted = [
        seconds(network, int(world), rounds("pairwise", int(world), int(count))) for world, count in found
    ]
    return Fit(
        network, [(*key, float(value), one) for key, value, one in zip(found, taken, fitted, strict=True)]
    )


def message_bytes(selector: str, world: int, batch: int) -> dict[str, float]:
    """Bytes of what a rank sends each other rank with a batch, and of its parts."""
    record = record_dtype(0)
    room = Outbox(list(range(world)), world).capacity(batch)
    rows = batch / world
    if selector in MERGED:
        rows = min(math.ceil(_MARGIN * batch) + _MORE, batch * world)
    head = exchanges._HEAD.size
    fixed = records.message_bytes(world, 1, 0, record, 0) + head
    updates = records.message_bytes(world, 1, 0, record, room) + head - fixed
    return {
        "fixed": fixed,
        "updates": updates,
        "records": rows * record.itemsize,
        "all": fixed + updates + rows * record.itemsize,
    }


class Played(SingleProcess):
    """The exchange of a rank, with the other ranks made up: each has this rank's shard summary, and sends its rows.

    took: seconds spent here. batch: rows a rank of the next exchanges. sent, received: bytes, to and from other ranks.
    """

    def __init__(self, world: int, mass: float, leaves: Array, rank: int = 0) -> None:
        self.rank, self.size, self.ranks = rank, world, range(world)
        self.took, self.batch = 0.0, 0
        self.sent = self.received = 0
        self._record = record_dtype(0)
        self._first = 16 + -(-world // 8)
        self._summary: Array = np.zeros(1, dtype=SUMMARY)
        for name, value in (("mass", mass), ("least", leaves[-1]), ("batch_least", leaves[-1])):
            self._summary[name] = value
        pool: Array = np.zeros(len(leaves), dtype=self._record)
        pool["id"], pool["slot"], pool["leaf"] = np.arange(len(pool)), np.arange(len(pool)), leaves
        pool["time"] = np.cumsum(np.random.default_rng(3).exponential(size=len(pool))) / mass
        self._pool = pool

    def share_array(self, values: Array) -> list[Array]:
        self.sent += values.nbytes * (self.size - 1)
        self.received += values.nbytes * (self.size - 1)
        return [values] * self.size

    def share(self, data: Mapping[str, Any]) -> list[Any]:
        found = self.share_array(np.frombuffer(json.dumps(data).encode(), dtype=np.uint8))
        answers = [json.loads(each.tobytes()) for each in found]
        for rank, answer in enumerate(answers):
            if "has" in answer:  # a part of a state: each has its own
                answer["has"][0] = [rank]
        return answers

    def send(self, values: Array, counts: Array) -> tuple[Array, Array]:
        """To rank 0 as much comes from each rank as it has itself; others get nothing, as their parts have all."""
        self.sent += values.nbytes - int(counts[self.rank]) * values.itemsize
        if self.rank or len(values) != counts[0]:
            return values[:0], np.zeros(self.size, dtype=np.int64)
        self.received += values.nbytes * (self.size - 1)
        return np.tile(values, self.size), np.full(self.size, len(values))

    def all_to_all(self, data: Array, outs: Array, ins: Array, failure: BaseException | None = None) -> Array:
        began = time.thread_time()
        if failure is not None:
            raise failure
        updates = Outbox(list(range(self.size)), self.size).capacity(self.batch) * UPDATE.itemsize
        answer: Array = np.zeros(ins.sum(), dtype=np.uint8)
        mine = slice(*np.cumsum([ins[: self.rank].sum(), ins[self.rank]]))
        answer[mine] = data[outs[: self.rank].sum() :][: outs[self.rank]]
        at = self._first + self._summary.nbytes
        for rank, (end, count) in enumerate(zip(np.cumsum(ins).tolist(), ins.tolist(), strict=True)):
            if rank == self.rank:
                continue
            message = answer[end - count : end]
            message[self._first : at] = self._summary.view(np.uint8)
            rows = (count - at - updates) // self._record.itemsize
            message[at : at + rows * self._record.itemsize] = self._pool[:rows].view(np.uint8)
        self.took += time.thread_time() - began
        return answer


@contextlib.contextmanager
def played(
    selector: str, world: int, *, trajectories: int, rank: int = 0
) -> Iterator[tuple[GlobalSelection, Played]]:
    """A selection of one of `world` ranks, and its exchange, in which the others are made up."""
    random = np.random.default_rng(11)
    priorities = random.permutation(trajectories).astype(np.float32) + 1
    schema = {"value": gear.Column(torch.float32)}
    with gear.Table.create(
        schema, max_steps=trajectories, max_trajectories=trajectories, block_steps=1
    ) as table:
        lengths = np.ones(trajectories, np.int64)
        table.extend({"value": torch.zeros(trajectories, 1)}, lengths=lengths, priority=priorities)
        table.set_origin(rank)
        chosen = SELECTORS[selector]
        leaves = np.sort(priorities.astype(np.float64) ** getattr(chosen, "alpha", 1.0))[::-1]
        mass = float(leaves.sum()) if selector != "uniform" else trajectories
        exchange = Played(world, mass, leaves, rank)
        places = [MeshCoordinates(each, 0) for each in range(world)]
        told: dict[str, Any] = {"num_shards": world, "num_slices": world, "num_stages": 1, "block_steps": {}}
        told |= {"leads": list(range(world)), "places": places, "place": places[rank], "own": {rank: table}}
        told |= {"nodes": np.arange(world) // 8, "table": table}
        shards: Any = types.SimpleNamespace(**told, lost=list, exchange=exchange, cache=None)
        context = SelectionContext(table, chosen, "last", None)
        yield GlobalSelection(context, shards, exchange, history=4, reach=None), exchange


def work(selector: str, world: int, batch: int, *, trajectories: int = 10_000, batches: int = 5) -> float:
    """Seconds of processor time of one of `world` ranks for a batch: median of a few, without the exchange itself."""
    with played(selector, world, trajectories=trajectories) as (selection, exchange):
        taken = []
        for number in range(batches + 2):
            if number == 0:
                selection.known_summaries()
                exchange.batch = batch
            before, began = exchange.took, time.thread_time()
            draw = Draw(5, 0, number, 0, batch * world, number=number)
            selection.draw(draw, selection.new_ticket())
            taken.append(time.thread_time() - began - (exchange.took - before))
        return float(np.median(taken[2:]))


def state(
    world: int, batch: int, *, trajectories: int = _SHARD, batches: int = 2, rank: int = 1
) -> dict[str, int]:
    """Bytes of the state of one of `world` ranks that draws by priority, and of what it sends and gets.

    "saved": of the tensors of its part; "full sent", "full received": with ``full=True``; "load sent", "load
    received": when it loads its part.
    """
    with played("prioritized", world, trajectories=trajectories, rank=rank) as (selection, exchange):
        selection.known_summaries()
        exchange.batch = batch
        for number in range(batches):
            selection.draw(Draw(5, 0, number, 0, batch * world, number=number), selection.new_ticket())
        found: dict[str, int] = {}

        def counted(what: str, act: Callable[[], Any]) -> Any:
            exchange.sent = exchange.received = 0
            value = act()
            found[f"{what} sent"], found[f"{what} received"] = exchange.sent, exchange.received
            return value

        part = counted("part", lambda: part_of_rank(exchange, selection.state_dict()))
        found["saved"] = tensor_bytes(part)
        whole = counted("full", lambda: gather(exchange, part_of_rank(exchange, selection.state_dict())))
        found["full saved"] = tensor_bytes(whole)
        counted("load", lambda: selection.load_state_dict(part))
        return found


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in dicts and lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    each = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(tensor_bytes, each))


def rows_away(world: int, batch: int, group: int, *, local: bool) -> float:
    """The share of rows that lie on another node than the rank that gets them; shards are of one size."""
    nodes = np.arange(world) // group
    shards = np.random.default_rng(7).integers(world, size=world * batch)
    slices = by_node(nodes[shards], nodes) if local else contiguous(len(shards), world)
    return float((nodes[shards[slices.rows]] != nodes[slices.number]).mean())


def command(
    rows: Annotated[
        Path | None, typer.Argument(help="Rows of multi-server: results/multi-server-cpu.jsonl by default.")
    ] = None,
    worlds: Annotated[str, typer.Option(help="Ranks.")] = ",".join(map(str, WORLDS)),
    batch: Annotated[int, typer.Option(min=1, help="Rows of a rank's batch.")] = 256,
    group: Annotated[int, typer.Option(min=1, help="Ranks of a node.")] = 8,
    budget: Annotated[float, typer.Option(min=0.001, help="Milliseconds that selection may take.")] = 10.0,
) -> None:
    """What selection costs with many ranks: work measured, network computed."""
    console = Console(width=150)
    try:
        numbers = sorted({int(part) for part in worlds.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 2 or numbers[-1] > 65_536:
        raise typer.BadParameter(f"{worlds!r}; expected numbers from 2 to 65,536.", param_hint="--worlds")
    file = rows or RESULTS / "multi-server-cpu.jsonl"
    if rows is not None and not file.is_file():
        raise typer.BadParameter(f"{file} is not there; run `python -m benchmarks multi-server` first.")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    fitted = fit(json.loads(line) for line in lines)
    if fitted is None:
        console.print("no rows of the collective alone: the loopback device is left out", style="yellow")
    else:
        console.print(_fitted(fitted))
    console.print(_messages(numbers, batch))
    taken = {
        name: {world: work(name, world, batch, batches=3 if world > 256 else 5) for world in numbers}
        for name in SELECTORS
    }
    console.print(_work(taken, batch))
    console.print(_exchanges(numbers, batch, group))
    console.print(_limits(taken, batch, group, budget / 1e3))
    console.print(_resources(numbers, batch, group))


def _fitted(fitted: Fit) -> Table:
    network = fitted.network
    title = (
        f"Loopback, fitted: start {network.start * 1e6:.0f} µs, alpha {network.alpha * 1e6:.1f} µs a message, "
        f"{1 / network.beta / 1e9 if network.beta else math.inf:.2f} GB/s, on {network.cores} cores"
    )
    lines = [
        (str(world), size(count), f"{measured * 1e6:,.0f}", f"{computed * 1e6:,.0f}")
        for world, count, measured, computed in sorted(fitted.points)
    ]
    return grid(title, ("ranks", "from each to each", "measured, µs", "fitted, µs"), lines)


def _worlds(numbers: Iterable[int]) -> list[str]:
    return [f"W = {number:,}" for number in numbers]


def _messages(numbers: Sequence[int], batch: int) -> Table:
    lines = []
    for name, called in (("prioritized", "uniform, prioritized"), ("top", "top, without replacement")):
        for part in ("fixed", "updates", "records", "all"):
            cells = [size((world - 1) * message_bytes(name, world, batch)[part]) for world in numbers]
            lines.append((called, part, *cells))
    title = f"Bytes that a rank sends with a batch of {batch}, to all others (computed by the code's own functions)"
    return grid(title, ("selector", "part", *_worlds(numbers)), lines, texts=2)


def _work(taken: Mapping[str, Mapping[int, float]], batch: int) -> Table:
    lines = [(name, *(f"{value * 1e3:,.2f}" for value in found.values())) for name, found in taken.items()]
    title = f"Work of one rank for a batch of {batch}, ms (measured, processor time; the other ranks played)"
    return grid(title, ("selector", *_worlds(next(iter(taken.values())))), lines)


def _exchange(network: Network, name: str, algorithm: str, world: int, batch: int, group: int) -> float:
    return seconds(network, world, rounds(algorithm, world, message_bytes(name, world, batch)["all"], group))


def _exchanges(numbers: Sequence[int], batch: int, group: int) -> Table:
    lines = []
    for name in ("prioritized", "top"):
        for called, network in NETWORKS.items():
            for algorithm in ("pairwise", "bruck", _by_node(name)):
                taken = (_exchange(network, name, algorithm, world, batch, group) for world in numbers)
                lines.append((name, called, algorithm, *(f"{value * 1e3:,.2f}" for value in taken)))
    title = f"One exchange of a batch of {batch}, ms (computed, not measured; {group} ranks a node)"
    return grid(title, ("selector", "network", "algorithm", *_worlds(numbers)), lines, texts=3)


def _limits(taken: Mapping[str, Mapping[int, float]], batch: int, group: int, budget: float) -> Table:
    """From which of the sizes on something takes longer than the budget."""
    lines = []
    for name, found in taken.items():
        cells = [_first(found, budget)]
        for network in NETWORKS.values():
            both = []
            for algorithm in ("pairwise", _by_node(name)):
                times = {world: _exchange(network, name, algorithm, world, batch, group) for world in found}
                both.append(_first(times, budget))
            cells.append(" / ".join(both))
        lines.append((name, *cells))
    title = (
        f"The first W at which it takes more than {budget * 1e3:g} ms (work: measured; exchange: computed, pairwise / "
        "by node; a dash: at none of these)"
    )
    return grid(title, ("selector", "work", *NETWORKS), lines)


def _resources(numbers: Sequence[int], batch: int, group: int) -> Table:
    """What is held, and asked for, beside selection."""
    nodes = {world: math.ceil(world / group) for world in numbers}
    away = {world: max(world - group, 0) for world in numbers}  # ranks, and shards, of other nodes
    # Each row falls to any shard; a rank asks each shard of another node that has any of its rows, once.
    hit = {world: 1 - (1 - 1 / world) ** batch for world in numbers}
    routes = {world: NodeRoutes.of(0, [str(rank // group) for rank in range(world)]) for world in numbers}
    messages = {world: world - 1 if each is None else each.most_messages for world, each in routes.items()}
    sockets = {
        world: world - 1 if each is None else each.most_messages - 2 * (group - 1)
        for world, each in routes.items()
    }
    of: dict[str, Callable[[int], str]] = {
        "messages of a rank for a batch": lambda world: f"{messages[world]:,}",
        "gloo sockets of a rank, Shards and one dataset": lambda world: f"{2 * sockets[world]:,}",
        "connections of a rank to servers": lambda world: f"{nodes[world] - 1:,}",
        "connections of a server": lambda world: f"{away[world]:,}",
        "requests to a server for one batch of every rank": lambda world: (
            f"{group * away[world] * hit[world]:,.0f}"
        ),
        "ids told for a pass in order of age, to each rank": lambda world: size(16 * _SHARD * world),
        "the whole state_dict by priority, on rank 0": lambda world: size(20 * _SHARD * world),
    }
    found = {name: [cell(world) for world in numbers] for name, cell in of.items()}
    states = [state(world, batch) for world in numbers]
    for name, kind in (
        ("saved", "saved"),
        ("sent to rank 0", "full sent"),
        ("received to load", "load received"),
    ):
        found[f"a rank's part of the state_dict, {name}"] = [size(each[kind]) for each in states]
    for name, local in (("as they come", False), ("prefer_local", True)):
        found[f"rows of other nodes, {name}"] = [
            f"{rows_away(world, 256, group, local=local):.1%}" for world in numbers
        ]
    for name in ("W1", "W2"):
        row = ranks.WORKLOADS[name].row_bytes
        one = {world: min(PART_BYTES, batch * row / (world * hit[world])) for world in numbers}
        staged = {world: 2 * away[world] * 2 ** math.ceil(math.log2(one[world])) for world in numbers}
        found[f"{name}: requests of a batch"] = [f"{away[world] * hit[world]:,.0f}" for world in numbers]
        found[f"{name}: bytes of a request"] = [size(one[world]) if away[world] else "–" for world in numbers]
        found[f"{name}: staging of a server"] = [size(staged[world]) for world in numbers]
    title = f"Beside selection (computed; {group} ranks a node, {_SHARD:,} trajectories a shard, batch {batch} a rank)"
    return grid(title, ("what", *_worlds(numbers)), [(name, *cells) for name, cells in found.items()])


def _by_node(selector: str) -> str:
    """The algorithm that sends one message a node."""
    return "one copy a node" if selector in MERGED else "hierarchical"


def _first(times: Mapping[int, float], budget: float) -> str:
    return next((f"{world:,}" for world, value in times.items() if value > budget), "–")

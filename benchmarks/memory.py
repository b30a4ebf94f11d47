"""``python -m benchmarks memory``: bytes resident for each byte of payload, with trajectories of uneven length.

Payload is the bytes of the steps themselves, float32 columns of random values. Every value is of a process of its own:
it stores a few trajectories and forgets them, then stores all, reads some back and compares them; the growth of its
own resident memory, over the payload, is the figure. What is needed only to draw is not counted.

====================== =======================================================================================
ours                   a table with as many blocks as these lengths need, of the size (`BLOCKS`, and the length
                       itself where all are equal) that needs the fewest bytes for them
ours, named            the same in shared memory
ours, blocks of N      the same with other sizes of blocks; 64 is the default of `Table.create`
fixed rows             GEAR's way: a row of the longest length for each, touched, as pinned memory is
list of tensors        a list with a dictionary of tensors for each trajectory
TorchRL                single steps for its `SliceSampler`     (these in the interpreters that --peers names:
TorchRL, padded        a padded row for each                    benchmarks/peers/make.sh makes them)
Reverb                 a server, filled by another process; each column of a trajectory is one chunk
Reverb, automatic ...  the same with chunks as Reverb chooses them
cpprb                  single steps
====================== =======================================================================================

Those with a row for each take as many of the trajectories as fit into `ROWS_BYTES`, the longest among them; rows say
how much payload that was. The distributions of lengths are those of `DISTRIBUTIONS`; episodes of Hopper-v5 are
collected with random actions, and repeated until there are enough. The parts of what a table takes beyond the payload
(ends of blocks, padding of blocks, index) are in the rows' `extras`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.markup import escape

import gear_loader as gear
from benchmarks import machine
from benchmarks.harness import Amount, Left, Session, grid, quantiles
from benchmarks.options import Minutes, Out, Peers, Quick, Repeats, Threads, opened
from benchmarks.peers import memory_peers
from benchmarks.peers.environments import interpreters, start
from benchmarks.peers.memory_peers import PEERS
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.workloads import W1, W2
from gear_loader.storage.layout import Layout
from gear_loader.storage.schema import Schema

__all__ = ["BLOCKS", "DISTRIBUTIONS", "Kind", "best_block", "command", "kinds", "run"]

SEED = 11
BLOCKS = (8, 16, 32, 64)
AT_MOST = 1.05
ROWS_BYTES = 768 << 20
UNIT = "bytes resident / byte of payload"
PADDED = ("fixed rows", "TorchRL, padded")
HOPPER = "Hopper-v5 episodes"
HOPPER_COLUMNS = {"observation": (11,), "action": (3,), "reward": ()}

Lengths = Callable[[np.random.Generator, int], np.ndarray]


def _log_normal(random: np.random.Generator, count: int) -> np.ndarray:
    return np.clip(random.lognormal(np.log(60), 1.0, count), 1, 1000).astype(np.int64)


DISTRIBUTIONS: dict[str, Lengths] = {
    "even": lambda random, count: np.full(count, 100),
    "uniform 1-512": lambda random, count: random.integers(1, 513, count),
    "uniform 100-1000": lambda random, count: random.integers(100, 1001, count),
    "geometric, mean 100": lambda random, count: random.geometric(0.01, count),
    "log-normal, at most 1000": _log_normal,
}
"""Name -> makes so many lengths. The log-normal one has a median of 60 and a mean of about 100."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A variant.

    Attributes:
        name: how rows and tables call it.
        launch: starts the process that measures it. Raises `PeerFailed`.
        options: what it is told, and parameters of its rows.
        ours: whether a failure ends the run; others are left out.
        at_most: what is aimed for with uneven lengths.
    """

    name: str
    launch: Callable[[], PeerProcess]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ours: bool = False
    at_most: float | None = None


def command(
    quick: Quick = False,
    payload: Annotated[float | None, typer.Option(min=1, help="Megabytes of steps: 100 by default.")] = None,
    peers: Peers = None,
    repeats: Repeats = None,
    out: Out = None,
    threads: Threads = None,
    minutes: Minutes = None,
) -> None:
    """Bytes resident for each byte of payload, with trajectories of uneven length."""
    payload_bytes = int(1e6 * (payload or (8 if quick else 100)))
    with opened(
        "memory",
        quick=quick,
        repeats=repeats or (1 if quick else 2),
        out=out,
        threads=threads,
        minutes=minutes,
        configuration={"payload_bytes": payload_bytes, "seed": SEED},
    ) as session:
        left, pythons = Left(session), interpreters(peers)
        settings = _settings(left, payload_bytes, quick=quick)
        run(session, left, settings, lambda setting: kinds(setting, pythons, quick=quick))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Columns (name -> shape of a step), and the lengths of the trajectories: int64 [n]."""

    workload: str
    columns_name: str
    columns: Mapping[str, tuple[int, ...]]
    lengths: np.ndarray

    @property
    def step_bytes(self) -> int:
        return 4 * sum(int(np.prod(shape)) for shape in self.columns.values())

    @property
    def label(self) -> str:
        return f"{self.workload}, columns of {self.columns_name}"

    def of_rows(self) -> Setting:
        """As many of them as fit into `ROWS_BYTES` with a row for each; the longest comes first."""
        longest = int(self.lengths.max())
        count = max(1, ROWS_BYTES // (longest * self.step_bytes))
        first = int(np.argmax(self.lengths))
        others = np.delete(self.lengths, first)[: count - 1]
        return dataclasses.replace(self, lengths=np.concatenate(([longest], others)))


def _settings(left: Left, payload: int, *, quick: bool) -> Iterator[Setting]:
    """What is measured, one after another."""
    for workload in (W2,) if quick else (W2, W1):
        columns = dict(workload.columns)
        for name, make in DISTRIBUTIONS.items():
            if quick and name != "uniform 1-512":
                continue
            found = Setting(name, workload.name, columns, np.empty(0))
            yield dataclasses.replace(found, lengths=_enough(make, payload // found.step_bytes))
    if not quick:
        try:
            episodes = _hopper()
        except ImportError as error:
            left.add(HOPPER, str(error))
            return
        found = Setting(HOPPER, "Hopper-v5", HOPPER_COLUMNS, np.empty(0))
        yield dataclasses.replace(
            found, lengths=_enough(lambda r, n: np.resize(episodes, n), payload // found.step_bytes)
        )


def _enough(make: Lengths, steps: int) -> np.ndarray:
    """Lengths of about so many steps together."""
    random = np.random.default_rng(SEED)
    mean = float(make(np.random.default_rng(SEED), 4096).mean())
    return make(random, max(64, int(steps / mean)))


def _hopper(steps: int = 40_000) -> np.ndarray:
    """Lengths of real episodes."""
    episodes = gear.sources.collect("Hopper-v5", max_steps=steps, seed=SEED, progress=False)
    return np.array([len(episode["reward"]) for episode in episodes])


# ---------------------------------------------------------------- variants


def best_block(setting: Setting) -> int:
    """The size of blocks that needs the fewest bytes for these lengths."""
    lengths = setting.lengths
    sizes = {*BLOCKS, *([int(lengths[0])] if np.all(lengths == lengths[0]) else [])}
    columns = {name: gear.Column(torch.float32, shape) for name, shape in setting.columns.items()}

    def region_bytes(block: int) -> int:
        blocks = gear.Table.required_blocks(lengths, block)
        sizes = {"max_steps": int(lengths.sum()), "max_trajectories": len(lengths)}
        return Layout(Schema(columns), **sizes, block_steps=block, num_blocks=blocks).region_bytes

    return min(sorted(sizes), key=region_bytes)


def kinds(setting: Setting, pythons: Sequence[Path], *, quick: bool = False) -> Iterator[Kind]:
    """The variants of a setting, ours first."""

    def own(name: str) -> Callable[[], PeerProcess]:
        program = [sys.executable, "-m", "benchmarks.memory_workers", name, "1"]
        return lambda: PeerProcess(program, folder=machine.ROOT)

    def other(name: str) -> Callable[[], PeerProcess]:
        environment = PEERS[name].environment
        return lambda: start(pythons, memory_peers.__file__, name, 1, environment=environment, patience=900)

    best = best_block(setting)
    uneven = None if setting.workload == "even" else AT_MOST
    yield Kind("ours", own("ours"), {"block_steps": best}, ours=True, at_most=uneven)
    named = {"block_steps": best, "named": True}
    yield Kind("ours, named", own("ours"), named, ours=True, at_most=uneven)
    for block in () if quick else BLOCKS:
        if block != best:
            yield Kind(f"ours, blocks of {block}", own("ours"), {"block_steps": block}, ours=True)
    yield Kind("fixed rows", own("fixed rows"))
    yield Kind("list of tensors", own("list of tensors"))
    for name in PEERS:
        if not (quick and name in ("Reverb, automatic chunks", "TorchRL, padded")):
            yield Kind(name, other(name))


# ---------------------------------------------------------------- measuring


def run(
    session: Session,
    left: Left,
    settings: Iterator[Setting],
    kinds_of: Callable[[Setting], Iterator[Kind]],
) -> None:
    """Measure and show one setting after another."""
    for setting in settings:
        if session.deadline.passed(setting.label):
            continue
        amounts = []
        for kind in kinds_of(setting):
            with session.console.status(f"{setting.label}: {kind.name}"):
                try:
                    amounts.append(session.record(_measured(session, setting, kind)))
                except PeerFailed as error:
                    if kind.ours:
                        raise
                    left.add(f"{kind.name}, {setting.label}", str(error))
        _show(session, setting.label, amounts)
    _show_summary(session)
    left.show()
    session.finish()


def _measured(session: Session, setting: Setting, kind: Kind) -> Amount:
    """A figure of each of several processes, one after another."""
    told = setting.of_rows() if kind.name in PADDED else setting
    values, answer, about = [], {}, {}
    for _ in range(session.repeats):
        process = kind.launch()
        try:
            about = process.about
            answer = process.ask(
                "measure",
                columns=told.columns,
                lengths=told.lengths.tolist(),
                seed=SEED,
                options=dict(kind.options),
            )
        finally:
            process.close()
        values.append(answer["bytes"] / answer["payload"])
    parameters = {
        "columns": setting.columns_name,
        "trajectories": len(told.lengths),
        "payload_bytes": answer["payload"],
        "mean_steps": float(told.lengths.mean()),
        "longest": int(told.lengths.max()),
        **kind.options,
        **({} if kind.ours else {"peer": about}),
    }
    return Amount(
        session.experiment,
        setting.workload,
        setting.label,
        kind.name,
        values,
        UNIT,
        parameters,
        at_most=kind.at_most,
        extras=answer["extras"],
    )


# ---------------------------------------------------------------- showing


def _verdict(amount: Amount) -> str:
    if amount.at_most is None:
        return ""
    return "[green]met[/]" if np.median(amount.values) <= amount.at_most else "[red]missed[/]"


def _show(session: Session, label: str, amounts: Sequence[Amount]) -> None:
    """A table for one setting."""
    if not amounts:
        return
    told = amounts[0].parameters
    table = grid(
        f"{label}: {told['trajectories']:,} trajectories of {told['mean_steps']:.0f} steps on average, "
        f"at most {told['longest']:,}"
    )
    table.add_column("variant", no_wrap=True)
    for head in ("payload", "resident ÷ payload", "p10 – p90", "at most", "", "ends + padding + index"):
        table.add_column(head, justify="right")
    for amount in amounts:
        low, mid, high = quantiles(np.array(amount.values)).values()
        name = amount.variant
        if name in ("ours", "ours, named"):
            name += f" (blocks of {amount.parameters['block_steps']})"
        parts = [f"{amount.extras[part]:.3f}" for part in ("ends", "padding", "index") if amount.extras]
        table.add_row(
            escape(name),
            f"{amount.parameters['payload_bytes'] / 1e6:,.0f} MB",
            f"{mid:.3f}",
            f"{low:.3f} – {high:.3f}",
            "" if amount.at_most is None else f"{amount.at_most:.2f}",
            _verdict(amount),
            " + ".join(parts),
        )
    session.console.print(table)


def _show_summary(session: Session) -> None:
    """Every variant against every setting."""
    labels = list(dict.fromkeys(amount.label for amount in session.amounts))
    if len(labels) < 2:
        return
    table = grid("Bytes resident for each byte of payload")
    table.add_column("variant", no_wrap=True)
    for label in labels:
        table.add_column(escape(label), justify="right")
    for name in dict.fromkeys(amount.variant for amount in session.amounts):
        mine = {amount.label: amount for amount in session.amounts if amount.variant == name}
        cells = [f"{np.median(mine[label].values):.3f}" if label in mine else "–" for label in labels]
        table.add_row(escape(name), *cells)
    session.console.print(table)

"""``python -m benchmarks remote-write``: adding to a table of another process, by 1, 4 and 16 writers.

All processes are on this machine: side by side, over loopback, or with ``--network namespaces``, as root, in two
network namespaces, one of the store and one of all writers, with the bandwidth and latency that one asks for.

Whole trajectories (W1: 42,000 bytes each) one by one or in batches, and single steps that are made a trajectory every
100 steps; writers do not wait for the server until the end of a measurement, within the limits of each library. Then
trajectories whose commit is waited for, one by one; `commit_p50` and `commit_p99` are the seconds of one, medians over
writers. The yardstick, carrier, is a socket that takes as many bytes in one piece a trajectory, or a batch, whose
receiver does nothing with them. Reverb is its `TrajectoryWriter` over gRPC; it has no call for batches. TorchRL is its
`RemoteTensorDictReplayBuffer`, called through torch.distributed.rpc. Each store is in a process of its own, is full,
and replaces the oldest trajectory. What was added is what is there: this is checked before and after.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Annotated, Any

import gear_loader as gear
from benchmarks.adding import PEERS, Crew, Group, Setting, TableCache, item_of
from benchmarks.harness import Medians, Session, Variant
from benchmarks.nodes.job import Bandwidth, Latency, Network, Node, Placed, check_limits, namespaces
from benchmarks.options import described, experiment, numbers
from benchmarks.peers.catalog import peers_of
from benchmarks.peers.source import elsewhere
from benchmarks.workloads import W1

TRAJECTORIES = 2_000
MODES = {
    "whole": "whole trajectories one by one",
    "batches": "whole trajectories in batches",
    "steps": "single steps",
    "commits": "trajectories whose commit is waited for",
}
GOALS = {"carrier": 0.5, "Reverb": 2.0}
"""Shares that ours should reach, of the carrier for whole trajectories only."""
_CARRIER, _OTHERS = "carrier", {"Reverb": "online", "TorchRL": "remote"}
_KINDS = {"Reverb": PEERS["Reverb"], **peers_of("remote")}


@experiment("remote-write", repeats=(2, 7))
def command(
    session: Session,
    writers: Annotated[str | None, described("Numbers of writers: 1,4,16 by default.")] = None,
    trajectories: Annotated[
        int | None, described(f"Of W1 in the table: {TRAJECTORIES:,} by default.", min=512)
    ] = None,
    seconds: Annotated[float | None, described("Of a measurement: 0.4 by default.", min=0.01)] = None,
    network: Placed = Network.processes,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
) -> None:
    """Adding to a table of another process, beside Reverb's client and a bare socket."""
    quick = session.quick
    limits = {"bandwidth": bandwidth, "latency": latency}
    check_limits(network, bandwidth, latency)
    setting = Setting(
        W1.of(trajectories or (600 if quick else TRAJECTORIES)),
        modes=tuple(MODES),
        writers=numbers(writers, "--writers", 1, 64) or ((1, 2) if quick else (1, 4, 16)),
        window=seconds or (0.04 if quick else 0.4),
    )
    about = {"network": network.value, "bandwidth_gbit": bandwidth, "latency_us": latency}
    told = {"writers": setting.writers, "trajectories": setting.workload.trajectories, **about}
    session.configure(writer_threads=1, **told, seconds=setting.window, seed=setting.seed)
    with contextlib.ExitStack() as stack:
        place = Place()
        if network is Network.namespaces:
            place = Place(*stack.enter_context(namespaces(2, **limits)))
        kinds = _kinds(session, stack, place)
        tables = stack.enter_context(TableCache())
        table = stack.enter_context(tables.table(setting.workload, block_steps=setting.block_steps))
        ours = {"table": table, "address": stack.enter_context(place.serving(table))}
        pairs = list(itertools.product(setting.modes, setting.writers))
        for mode, count in session.each("adding", pairs, _label):
            label = _label((mode, count))
            with contextlib.ExitStack() as groups:
                made = functools.partial(_variant, session, setting, place, mode, count, label, groups)
                found = [made(name, *kind, ours if name == "ours" else {}) for name, kind in kinds.items()]
                variants = [variant for variant in found if variant is not None]
                parameters = {"writers": count, "item": item_of(mode), **setting.parameters(), **about}
                others = [variant.name for variant in variants if variant.name in _OTHERS]
                session.compare(mode, label, variants, _CARRIER, parameters, references=others)


class Place:
    """Where the store and the writers run: network namespaces, or, without any, this one.

    store: the node of the server. writers: that of the writers.
    """

    def __init__(self, store: Node | None = None, writers: Node | None = None) -> None:
        self.store, self.writers = store, writers

    def spec(self, setting: Setting) -> dict[str, Any]:
        """What writers are told, and the host of the store if it is another one."""
        return setting.spec | ({} if self.store is None else {"host": self.store.host})

    @contextlib.contextmanager
    def serving(self, table: gear.Table) -> Iterator[list[str]]:
        """A server of our table; its url and secret."""
        node = self.store or Node("this one")
        with elsewhere(node.namespace, lambda: table.serve(host=node.host)) as server:
            yield [server.url, server.secret.decode()]


def _kinds(
    session: Session, stack: contextlib.ExitStack, place: Place
) -> dict[str, tuple[Crew, Crew | None]]:
    """The writers of each kind, and the processes that have the stores of others."""
    libraries = {_CARRIER: "gear_remote", "ours": "gear_remote", **dict.fromkeys(_OTHERS)}
    kinds: dict[str, tuple[Crew, Crew | None]] = {}
    for name, library in libraries.items():
        folder, task = None if library else session.peers, _OTHERS.get(name, "online")
        made = functools.partial(Crew, name, folder, library=library, task=task)
        crew = made(prefix=() if place.writers is None else place.writers.prefix)
        stack.callback(crew.close)
        store = None
        if name != "ours" and (library is None or place.store is not None):
            store = made(prefix=() if place.store is None else place.store.prefix)
            stack.callback(store.close)
        if library or session.attempt(name, crew.start) is not None:
            kinds[name] = crew, store
    return kinds


def _label(pair: tuple[str, int]) -> str:
    mode, writers = pair
    return f"{MODES[mode]}, {writers} {'writer' if writers == 1 else 'writers'}"


def _variant(
    session: Session,
    setting: Setting,
    place: Place,
    mode: str,
    writers: int,
    label: str,
    groups: contextlib.ExitStack,
    name: str,
    crew: Crew,
    store: Crew | None,
    options: dict[str, Any],
) -> Variant | None:
    """Writers of one kind; None if they do not work, or have no call for that."""
    kind = _KINDS.get(name)
    if kind is not None and mode not in (*kind.modes, *(["commits"] if kind.waits else [])):
        return None
    given = options if store is None else {**options, "store": store.start()[0]}
    made = functools.partial(Group, crew, place.spec(setting), mode, writers, **given)
    group = session.attempt(f"{name}, {label}", made, required=kind is None)
    if group is None:
        return None
    groups.callback(group.close)
    medians = Medians()

    def measure() -> float:
        seconds: float = group.measure(setting.window)
        for figure in ("commit_p50", "commit_p99"):
            values = [answer[figure] for answer in group.answers if figure in answer]
            if values:
                medians.note(**{figure: sorted(values)[len(values) // 2]})
        return seconds

    amount = setting.step_bytes * (1 if item_of(mode) == "step" else setting.workload.steps)
    about = {} if kind is None else {"peer": crew.start()[0].about}
    targets = {goal: GOALS[goal] for goal in GOALS if goal != _CARRIER or mode in ("whole", "batches")}
    variant = Variant(name, measure, group.check, amount, 1, about, required=kind is None, extras=medians)
    variant.targets = targets if name == "ours" else {}
    return variant

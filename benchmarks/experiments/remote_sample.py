"""``python -m benchmarks remote-sample``: batches of a learner whose table lies in another process, over loopback.

Whole trajectories (W1: 42,000 bytes each), and single transitions (96 bytes, each a trajectory of one step), drawn by
priority (alpha 0.6, beta 0.4, with importance weights), in batches of 256. Ours is `ReplayDataset` over
`gear_loader.connect`; the server, which draws and gathers, is a process of its own. Reverb is its `TrajectoryDataset`
over gRPC, with a server of its own process, in the fastest of its settings (see `benchmarks.peers.reverb`), which is
how a learner reads it. The yardstick, carrier, is a socket that gets ready batches of as many bytes in one piece.
Each way checks what it gets to the byte before it is measured. Everything is on this machine and shares its cores.

With ``--network namespaces``, as root, the stores are in one network namespace, and learners and writers in another,
with the bandwidth and latency that one asks for. With ``--writers N`` as many processes add whole trajectories to each
way's store while batches of it are measured; those of the carrier send as many bytes to a socket. `batch_p50` and
`batch_p99` are the seconds of one batch, medians over turns; `added`: trajectories that writers added in a second;
`covered`: the share of the measurement in which they did.

With ``--beside`` ours is also measured, in turn and on the same store, while another process has learners of the same
server that behave badly (see `benchmarks.peers.gear_beside`). `acts`: how often they did while they were measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.adding import Crew, Group, specify
from benchmarks.batches import SEED
from benchmarks.harness import Medians, Session, Variant
from benchmarks.nodes.job import Bandwidth, Latency, Network, Node, Placed, check_limits, namespaces
from benchmarks.options import described, experiment, some_of
from benchmarks.peers.gear_beside import IDLE, LIES
from benchmarks.peers.process import PeerProcess, start
from benchmarks.workloads import STEPS, W1, Workload

_CARRIER, _REVERB = "carrier", "Reverb, gRPC"
_MODULES = {_CARRIER: "gear_served", "ours": "gear_served", _REVERB: "reverb"}
_WRITERS = {
    _CARRIER: ("carrier", "gear_remote"),
    "ours": ("ours", "gear_remote"),
    _REVERB: ("Reverb", "reverb"),
}
BESIDE = {
    "slow": "a slow learner",
    "lying": f"a learner that lies {LIES} times a second",
    "idle": f"{IDLE} idle learners",
}
"""What ours is measured beside; it should keep `KEPT` of its speed."""
KEPT = 0.9
GOALS = {_REVERB: 5.0}
"""Shares that ours should reach; between namespaces also 0.9 of the carrier for whole trajectories."""
WORKLOADS = {"W1": W1.of(4_000), "transitions": dataclasses.replace(STEPS, steps=1, trajectories=20_000)}


@experiment("remote-sample", repeats=(2, 7))
def command(
    session: Session,
    parts: Annotated[str, typer.Option(help=f"Some of {','.join(WORKLOADS)}; all by default.")] = ",".join(
        WORKLOADS
    ),
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 256,
    trajectories: Annotated[
        int | None, typer.Option(min=16, help="4,000 of W1 and 20,000 transitions by default.")
    ] = None,
    writers: Annotated[int, described("Processes that add meanwhile.", min=0, max=64)] = 0,
    beside: Annotated[str, typer.Option(help=f"Some of {','.join(BESIDE)}; none by default.")] = "",
    network: Placed = Network.processes,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
) -> None:
    """Batches of a learner from a table of another process, beside Reverb's client and a bare socket."""
    chosen = some_of(parts, tuple(WORKLOADS), "--parts")
    check_limits(network, bandwidth, latency)
    named = some_of(beside, tuple(BESIDE), "--beside") if beside else []
    about = {
        "network": network.value,
        "bandwidth_gbit": bandwidth,
        "latency_us": latency,
        "writers": writers,
        "beside": named,
    }
    session.configure(batch=batch, parts=chosen, trajectories=trajectories, seed=SEED, **about)
    with contextlib.ExitStack() as stack:
        nodes = None
        if network is Network.namespaces:
            nodes = Nodes(*stack.enter_context(namespaces(2, bandwidth=bandwidth, latency=latency)))
        prefix = () if nodes is None else nodes.learner.prefix
        launches = {
            name: functools.partial(
                start, session.peers, "batches", module, name, session.threads, prefix=prefix
            )
            for name, module in _MODULES.items()
        }
        processes = stack.enter_context(session.processes(launches, required=(_CARRIER, "ours")))
        crews = {name: stack.enter_context(_crews(session, name, nodes)) for name in processes}
        bad = {
            name: functools.partial(start, None, "gear_beside", "gear_beside", name, prefix=prefix)
            for name in named
        }
        learners = stack.enter_context(session.processes(bad, required=named))
        for part in session.each("remote-sample", chosen, str):
            count = trajectories or (300 if session.quick else WORKLOADS[part].trajectories)
            workload = WORKLOADS[part].of(count)
            found = []
            with contextlib.ExitStack() as groups:
                for name, process in processes.items():
                    way = _Way(name, process, workload, batch, nodes, writers)
                    made = functools.partial(way.variant, session, crews[name], groups)
                    found.append(session.attempt(f"{name}, {part}", made, required=name != _REVERB))
                    if name == "ours":
                        found += [way.beside(found[-1], each, learners[each]) for each in named]
                variants = [variant for variant in found if variant is not None]
                references = {_REVERB, "ours"} if named else {_REVERB}
                others = [variant.name for variant in variants if variant.name in references]
                parameters = {"batch": batch, "trajectories": count, "row_bytes": workload.row_bytes, **about}
                session.compare(
                    part, _label(part, about), variants, _CARRIER, parameters, others, unit="rows"
                )


def _label(part: str, about: Mapping[str, Any]) -> str:
    writers, gbit = about["writers"], about["bandwidth_gbit"]
    words = [part]
    if writers:
        words.append(f"{writers} {'writer' if writers == 1 else 'writers'}")
    if about["beside"]:
        words.append("beside others")
    if about["network"] == Network.namespaces.value:
        words.append("namespaces" if gbit is None else f"{gbit:g} Gbit/s")
    return ", ".join(words)


class Nodes(NamedTuple):
    """Where stores are, and who reads them and writes to them."""

    store: Node
    learner: Node


@contextlib.contextmanager
def _crews(session: Session, name: str, nodes: Nodes | None) -> Iterator[tuple[Crew, Crew | None]]:
    """The writers of a way; and what receives the carrier's between namespaces."""
    kind, module = _WRITERS[name]
    made = functools.partial(Crew, kind, session.peers if name == _REVERB else None, library=module)
    crew, store = made(prefix=() if nodes is None else nodes.learner.prefix), None
    if name == _CARRIER and nodes is not None:
        store = made(prefix=nodes.store.prefix)
    try:
        yield crew, store
    finally:
        for each in filter(None, (crew, store)):
            each.close()


@dataclasses.dataclass
class _Way:
    """A way of reading: in which process, what, where its store is, and how many write to it meanwhile.

    The last four are set by `variant`: address of the store; writers; batches of a measurement, and its seconds about.
    """

    name: str
    process: PeerProcess
    workload: Workload
    batch: int
    nodes: Nodes | None
    writers: int
    address: Any = None
    group: Group | None = None
    count: int = 0
    seconds: float = 0.0

    def variant(
        self, session: Session, crews: tuple[Crew, Crew | None], groups: contextlib.ExitStack
    ) -> Variant:
        """It, filled, and in its fastest setting."""
        address = self.address = self.process.ask("build", spec=self._spec())["address"]
        setting = self.process.ask("prepare", batch=self.batch)["setting"]
        count, self.seconds = 4, 0.02 if session.quick else 0.3
        while (seconds := self._ask(count)["seconds"]) < self.seconds / 4 and count < 1 << 14:
            count *= 2
        self.count = max(2, round(count * self.seconds / seconds))
        if self.writers:
            self.group = self._group(crews, address)
            groups.callback(self.group.close)
        medians, ours = Medians(), self.name == "ours"
        goals = (
            {**GOALS, _CARRIER: 0.9} if self.nodes is not None and self.workload.name == W1.name else GOALS
        )
        about: dict[str, Any] = {"setting": setting}
        if self.name == _REVERB:
            about = {"peer": {**self.process.about, **about}}
        return Variant(
            self.name,
            lambda: self._measure(medians),
            self._check,
            self.batch,
            self.count,
            about,
            goals if ours else {},
            required=self.name != _REVERB,
            extras=medians,
        )

    def beside(self, alone: Variant, name: str, learners: PeerProcess) -> Variant:
        """The same as `alone`, a variant of this way, while learners in that process behave badly."""
        learners.ask("build", spec=self._spec(), address=self.address, rows=min(self.batch, 16))
        medians = Medians()

        def measure() -> float:
            learners.ask("begin")
            try:
                seconds = self._measure(medians)
            finally:
                medians.note(acts=learners.ask("end")["acts"])
            return seconds

        changed = {"parameters": {**alone.parameters, "beside": name}, "targets": {alone.name: KEPT}}
        title = f"{alone.name}, beside {BESIDE[name]}"
        return dataclasses.replace(alone, name=title, measure=measure, extras=medians, **changed)

    def _measure(self, medians: Medians) -> float:
        short = self.seconds
        if self.group is not None:
            begin = self.group.start(2 * short)  # read while all of them write
            time.sleep(max(0.0, begin - time.monotonic()) + 0.2 * short)
        answer = self._ask(self.count)
        if self.group is not None:
            medians.note(added=self.group.rate(), covered=min(1.0, 1.8 * short / answer["seconds"]))
            self.seconds = max(short, answer["seconds"])
        medians.note(**{each: answer[each] for each in ("batch_p50", "batch_p99")})
        return float(answer["seconds"])

    def _check(self) -> None:
        self.process.ask("check", times=2)

    def _ask(self, batches: int) -> dict[str, Any]:
        return self.process.ask("measure", batches=batches)

    def _spec(self) -> dict[str, Any]:
        """Of the store, and of its writers, who add what is there: so what is read can be checked as before."""
        spec = specify(self.workload, batch=1, seed=SEED)
        spec |= {"window": self.workload.steps, "sources": max(1, self.workload.trajectories // 64)}
        if self.nodes is not None:
            spec |= {"host": self.nodes.store.host, "namespace": self.nodes.store.namespace}
        return spec

    def _group(self, crews: tuple[Crew, Crew | None], address: Any) -> Group:
        crew, store = crews
        own = None if store is None else store.start()[0]
        return Group(crew, self._spec(), "whole", self.writers, fill=False, address=address, store=own)

"""The ranks of one job of ``multi-server`` as seen by the command line: they are told what to do all at once."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.experiments.multi_server_nodes import Node
from benchmarks.harness import Incorrect, Variant
from benchmarks.peers.process import PeerFailed, PeerProcess, Undo
from gear_loader.storage.region import region_path

_MOST_BATCHES = 400
_names = iter(range(10**9))


class Job:
    """Ranks, each with a shard of its own.

    nodes: of each rank. Ranks of the same node share memory. carrier: what rows of other nodes come over, ours and the
    bare ones; None where there are none. patience: seconds that an answer may take.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        carrier: str | None,
        environment: Mapping[str, str],
        patience: float = 180.0,
    ) -> None:
        self.nodes, self.carrier = list(nodes), carrier
        self._folder = tempfile.TemporaryDirectory(prefix="gear-bench-")
        self._undo = Undo()
        self._mark = f"bench-multi-{os.getpid()}-{secrets.token_hex(4)}"
        for rank in range(len(nodes)):
            self._undo.add("rm", "-f", region_path(f"{self._mark}-{rank}"))
        commands = [
            node.command("benchmarks.experiments.multi_server_ranks", **environment) for node in nodes
        ]
        if carrier is not None and len(nodes) > 1:
            bare = "benchmarks.experiments.multi_server_bare"
            commands += [node.command(bare, carrier, node.host, **environment) for node in nodes]
        self._processes: list[PeerProcess] = []
        try:
            with concurrent.futures.ThreadPoolExecutor(len(commands)) as pool:
                started = [
                    pool.submit(PeerProcess, command, patience=patience, folder=machine.ROOT)
                    for command in commands
                ]
            self._processes = [future.result() for future in started if future.exception() is None]
            for future in started:
                future.result()
            self.ranks, senders = self._processes[: len(nodes)], self._processes[len(nodes) :]
            world, store = len(nodes), str(Path(self._folder.name) / "store")
            self.each("join", [{"rank": rank, "world": world} for rank in range(world)], store=store)
            if senders:
                # The next rank's first: it is the one that is asked where one alone is.
                addresses = [sender.about["address"] for sender in senders]
                turned = [addresses[rank + 1 :] + addresses[:rank] for rank in range(world)]
                self.each("bare", [{"addresses": others} for others in turned], carrier=carrier)
        except BaseException:
            self.close()
            raise

    def fill(self, workload: str, trajectories: int, seed: int) -> None:
        """Give every rank a shard."""
        options = [
            {"transport": self.carrier, "node": node.name, "host": node.host} if self.carrier else {}
            for node in self.nodes
        ]
        told = {"workload": workload, "trajectories": trajectories, "seed": seed, "table": self._mark}
        self.each("fill", [{"options": own} for own in options], **told)

    def each(
        self,
        what: str,
        arguments: Sequence[Mapping[str, Any]] | None = None,
        *,
        first: bool = False,
        **shared: Any,
    ) -> list[dict[str, Any]]:
        """Tell all ranks, or the first one alone, to do something; their answers."""
        ranks = self.ranks[:1] if first else self.ranks
        own = arguments or [{}] * len(ranks)
        for process, extra in zip(ranks, own, strict=True):
            process.send(what, **extra, **shared)
        answers, failures = [], []
        for number, process in enumerate(ranks):
            try:
                answers.append(process.receive())
            except PeerFailed as error:
                failures.append(f"rank {number}: {error}")
        if failures:
            raise PeerFailed("; ".join(failures))
        return answers

    def close(self) -> None:
        """End all processes, and leave nothing of them."""
        if self._processes:
            with concurrent.futures.ThreadPoolExecutor(len(self._processes)) as pool:
                list(pool.map(PeerProcess.close, self._processes))
        self._undo.__exit__()
        self._folder.cleanup()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(eq=False)
class Subject:
    """Something that the ranks of a job do, as a `Variant`.

    kind: of `multi_server_ranks.SUBJECTS`; options: its. first: rank 0 alone does it. window: seconds that a
    measurement should take. seconds: of every batch of every rank, as measured. figures: means over the ranks.
    """

    job: Job
    kind: str
    window: float
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    first: bool = False
    seconds: list[float] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = f"{self.kind} {next(_names)}"
        # The first rank's requests are its own, but all ranks tell each other of their shards when it is made.
        self.job.each("prepare", name=self.name, kind=self.kind, **self.options)

    def variant(self, name: str, amount: int, **more: Any) -> Variant:
        made = Variant(name, lambda: self._measure(made), lambda: self._check(made), amount, 1, **more)
        made.extras = self._extras
        return made

    def _check(self, variant: Variant) -> None:
        answers = self.job.each("check", first=self.first, name=self.name)
        for rank, answer in enumerate(answers):
            if "wrong" in answer:
                raise Incorrect(f"rank {rank}: {answer['wrong']}")
        self.figures = {
            key: float(np.mean([answer["figures"][key] for answer in answers]))
            for key in answers[0]["figures"]
        }
        variant.batches = 3
        one = self._measure(variant) / 3
        variant.batches = int(np.clip(self.window / max(one, 1e-9), 3, _MOST_BATCHES))
        self.seconds.clear()

    def _measure(self, variant: Variant) -> float:
        answers = self.job.each(
            "measure", first=self.first, name=self.name, batches=variant.batches, together=not self.first
        )
        for answer in answers:
            self.seconds += answer["each"]
        return float(np.mean([answer["seconds"] for answer in answers]))

    def _extras(self) -> dict[str, float]:
        low, high = np.quantile(self.seconds, (0.5, 0.95))
        return {"latency_p50": float(low), "latency_p95": float(high), **self.figures}

    def close(self) -> None:
        """Let the ranks forget it."""
        self.job.each("drop", name=self.name)

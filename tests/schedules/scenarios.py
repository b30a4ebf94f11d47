"""One run of a dataset on the stand-in, chosen by a seed, beside a CPU selection that draws at the same moments."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import on_host
from options_common import nested, nested_table
from streams.cuda import GLOBAL, RELAXED, Cuda
from streams.machine import Policy

import gear_loader as gear
from gear_loader.collection.batches_ahead import STANDING, BatchesAhead
from gear_loader.collection.collector import TableSource, collector_for
from gear_loader.collection.packed_cuda import PackedCuda
from gear_loader.collection.windows import expand
from gear_loader.dataset.origin import Origin
from gear_loader.errors import StaleIndexError
from gear_loader.selection import uniform_cuda
from gear_loader.selection.prioritized import PrioritizedSelection
from gear_loader.selection.prioritized_cuda import CudaPrioritizedSelection
from gear_loader.storage.device_server import BlockClient, BlockServer
from gear_loader.storage.readers import Ticket
from gear_loader.storage.region import Region

BATCH = 6
FIRST = 12
DEVICE = torch.device("cuda", 1)
SAMPLERS = {
    "uniform": lambda: gear.Uniform(),
    "steps": lambda: gear.Uniform(unit="step"),
    "pass": lambda: gear.Uniform(replacement=False),
    "prioritized": lambda: gear.Prioritized(0.6, gear.LinearSchedule(0.4, 1.0, batches=9), eps=1e-3),
    "prioritized steps": lambda: gear.Prioritized(1.0, unit="step", normalize="table"),
    "distinct": lambda: gear.Prioritized(1.0, replacement=False, normalize="batch"),
    "top": lambda: gear.TopK(),
}


@dataclasses.dataclass(frozen=True)
class Shrinkable:
    """What happens in a run; it can have less in it."""

    def play(self, seed: int, policy: Policy, *, ordered: bool = True) -> Cuda:
        """Run it, and raise an error if anything goes wrong.

        Args:
            seed, policy: see `Machine`.
            ordered: whether accesses that nothing orders are errors, or wrong values alone.
        """
        raise NotImplementedError

    def simpler(self) -> Iterator[Shrinkable]:
        """Scenarios with less in them, to shrink a failure."""
        for field in dataclasses.fields(self):
            for value in (field.default, getattr(self, field.name)):
                if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                    value //= 2
                made = dataclasses.replace(self, **{field.name: value})
                if made != self and made.size <= self.size:
                    yield made

    @property
    def size(self) -> tuple[int, int]:
        """Less is simpler."""
        differ = sum(getattr(self, field.name) != field.default for field in dataclasses.fields(self))
        numbers = (value for value in vars(self).values() if isinstance(value, int))
        return differ, sum(numbers)


@dataclasses.dataclass(frozen=True)
class Scenario(Shrinkable):
    """What happens in a run.

    Attributes:
        sampler: key of `SELECTORS`.
        prefetch, copy, complete: of the dataset.
        pinned: whether the device can read the table; else batches are gathered on the host.
        pinning: whether a thread is still pinning it when the dataset is made.
        side: whether the consumer works on a stream of its own.
        writes: trajectories that another thread adds meanwhile; they evict others.
        grows: whether they are added step by step.
        batches: number of batches of an epoch. epochs: number of epochs; the first ends early.
        hold: how many batches the consumer keeps, and reads again.
        updates: whether priorities change; on the device or from the host.
        samples: calls of `sample` after each epoch.
        stops: whether the last epoch ends early too.
        drops: whether the dataset is dropped while the device still works.
        looks: whether the consumer asks for counts and states.
        mode: what else torch is told: ``"inference"`` mode, another ``"default device"`` or current ``"device"``, or
            the ``"capture"`` of a graph while other threads go on, or ``"captures elsewhere"``, by another thread while
            the consumer asks for something, or ``"launches elsewhere"`` of such a thread.
        packed: whether the columns share a record.
        layout: of the batches; all but ``"padded"`` have a number of steps instead of rows if `budget`.
        budget: see `layout`. converts: whether some windows have another dtype.
        tier: whether some trajectories lie on a disk only.
        late: whether a column is filled later, of some trajectories while batches are made.
        pairs: whether groups of two trajectories are drawn.
        on_gpu: whether the table's blocks lie in the memory of the device. attached: that another process has.
        calm: whether the other thread adds one trajectory in seventeen batches.
        draws: whether the device draws uniform rows, of small batches too and soon after a change.
    """

    sampler: str = "uniform"
    prefetch: int = 2
    copy: bool | None = None
    complete: bool = False
    pinned: bool = True
    pinning: bool = False
    side: bool = False
    writes: int = 0
    grows: bool = False
    batches: int = 5
    epochs: int = 1
    hold: int = 0
    updates: str = ""
    samples: int = 0
    stops: bool = False
    drops: bool = False
    looks: bool = False
    mode: str = ""
    packed: bool = False
    tier: bool = False
    late: bool = False
    layout: str = "padded"
    budget: bool = False
    converts: bool = False
    pairs: bool = False
    on_gpu: bool = False
    attached: bool = False
    calm: bool = False
    draws: bool = False

    @classmethod
    def flat(cls, seed: int) -> Scenario:
        """The scenario of a seed with packed batches, with conversions or without."""
        scenario, choose = cls.of(seed), random.Random(f"layout {seed}")
        budget = choose.random() < 0.5 and scenario.sampler in ("uniform", "pass")
        return dataclasses.replace(
            scenario,
            layout=choose.choice(["packed", "packed", "packed", "padded"]),
            budget=budget,
            samples=0 if budget else scenario.samples,
            batches=2 * scenario.batches,  # so that buffers that were delivered grow
            converts=choose.random() < 0.5,
            complete=False,
            grows=False,
            pairs=choose.random() < 0.4
            and "steps" not in scenario.sampler
            and scenario.sampler != "distinct",
        )

    @classmethod
    def queued(cls, seed: int) -> Scenario:
        """That of a seed whose batches are drawn and queued in one compiled call, where the table stands still."""
        choices = {
            "sampler": "steps" if seed % 3 else "uniform",
            "updates": "",
            "batches": 16,
            "pinned": True,
        }
        return dataclasses.replace(cls.of(seed), **choices, copy=None if seed % 2 else False)

    @classmethod
    def queued_ahead(cls, seed: int) -> Scenario:
        """That of a seed whose batches are queued several at a time, where the table stands still."""
        scenario = cls.queued(seed)
        few = {"prefetch": 1 + seed % 3, "writes": min(scenario.writes, 4), "epochs": 1, "grows": False}
        return dataclasses.replace(scenario, **few, calm=True, batches=64, stops=False)

    @classmethod
    def drawn(cls, seed: int) -> Scenario:
        """That of a seed whose uniform rows the device draws, where the table stands still."""
        scenario = cls.queued_ahead(seed) if seed % 2 else cls.queued(seed)
        few = {"calm": True, "batches": 48, "epochs": 1, "stops": False, "writes": min(scenario.writes, 8)}
        return dataclasses.replace(scenario, **few, copy=None, draws=True)

    @classmethod
    def queued_packed(cls, seed: int) -> Scenario:
        """That of a seed whose packed batches are drawn, planned and queued in one compiled call."""
        sampler = ["uniform", "prioritized", "steps", "prioritized steps"][seed % 4]
        scenario, choose = cls.flat(seed), random.Random(f"packed {seed}")
        choices = {"sampler": sampler, "budget": False, "batches": 24, "pinned": True, "pairs": False}
        choices |= {"layout": "packed", "epochs": 1, "writes": min(scenario.writes, 20)}
        updates = choose.choice(["", "device", "host"]) if "prior" in sampler else ""
        return dataclasses.replace(scenario, **choices, updates=updates, copy=None if seed % 3 else False)

    @classmethod
    def queued_draws(cls, seed: int) -> Scenario:
        """That of a seed whose draws by priority, and updates, are queued in one compiled call each."""
        sampler = ["prioritized", "prioritized steps", "distinct"][seed % 3]
        choices = {"sampler": sampler, "updates": "device", "batches": 32, "epochs": 1, "pinned": True}
        scenario, few = cls.of(seed), {"prefetch": seed % 2, "hold": seed % 3 // 2, "stops": False}
        return dataclasses.replace(scenario, **choices, **few, copy=None, writes=min(scenario.writes, 20))

    @classmethod
    def flat_tier(cls, seed: int) -> Scenario:
        """That of a seed with packed batches of a table with a disk tier, in half of them with a late column."""
        scenario = cls.flat(seed)
        sampler = scenario.sampler.replace("prioritized steps", "prioritized")
        return dataclasses.replace(
            scenario, sampler=sampler, layout="packed", tier=True, late=seed % 2 == 0, pairs=False
        )

    @classmethod
    def groups(cls, seed: int) -> Scenario:
        """That of a seed with packed batches of pairs."""
        scenario, first = cls.flat(seed), seed % 2 == 0
        choices = (
            {"sampler": "uniform", "updates": ""} if first else {"sampler": "prioritized", "budget": False}
        )
        return dataclasses.replace(scenario, pairs=True, **choices)

    @classmethod
    def on_disk(cls, seed: int) -> Scenario:
        """That of a seed with a disk tier."""
        return dataclasses.replace(cls.of(seed), tier=True, grows=False)

    @classmethod
    def in_device_memory(cls, seed: int) -> Scenario:
        """That of a seed with a table in the memory of the device; each second seed may have packed batches."""
        return dataclasses.replace(cls.flat(seed) if seed % 2 else cls.of(seed), on_gpu=True, grows=False)

    @classmethod
    def on_disk_below_device(cls, seed: int) -> Scenario:
        """That of a seed with a table in the memory of the device, and a disk tier below it."""
        return dataclasses.replace(cls.in_device_memory(seed), tier=True)

    @classmethod
    def attached_to_device(cls, seed: int) -> Scenario:
        """As of a process that is attached to a table in the memory of a device, in each third seed with a disk."""
        scenario = cls.in_device_memory(seed)
        return dataclasses.replace(scenario, attached=True, pinning=False, tier=seed % 3 == 0)

    @classmethod
    def of(cls, seed: int, mode: str = "") -> Scenario:
        """The scenario of a seed."""
        choose = random.Random(f"scenario {seed}")
        sampler = choose.choice(list(SAMPLERS))
        steady = sampler == "pass"  # looks at the table between two calls, where others may run
        return cls(
            sampler=sampler,
            prefetch=choose.choice([0, 1, 2, 3]),
            copy=choose.choice([None, None, True, False]),
            complete=choose.random() < 0.25,
            pinned=choose.random() < 0.75,
            side=choose.random() < 0.5,
            writes=0 if steady else choose.choice([0, 20, 60]),
            grows=choose.random() < 0.4,
            batches=choose.choice([3, 5, 8]),
            epochs=choose.choice([1, 1, 2]),
            hold=choose.choice([0, 0, 1, 3]),
            updates=choose.choice(["", "device", "device", "host"])
            if sampler.startswith(("prior", "dist", "top"))
            else "",
            samples=choose.choice([0, 0, 2]),
            stops=choose.random() < 0.4,
            drops=choose.random() < 0.5,
            looks=choose.random() < 0.3,
            mode=mode,
            packed=choose.random() < 0.5,
        )

    def play(self, seed: int, policy: Policy, *, ordered: bool = True) -> Cuda:
        run = Run(self, seed, policy, ordered=ordered)
        run.run()
        return run.cuda


@contextlib.contextmanager
def collected_on_request() -> Iterator[None]:
    """Without garbage collection but by `gc.collect`: else it would run at other moments each time."""
    collecting = gc.isenabled()
    gc.disable()
    gc.collect()  # what older tests have left does not end in the middle
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Mismatch(AssertionError):
    """A batch differs from what was drawn."""


def rows_of(number: int) -> dict[str, Any]:
    """The trajectory with this number."""
    length = 3 + number % 6
    return {
        "value": np.full((length, 5), number, np.float32),
        "number": 100 * number + np.arange(length),
        "task": np.array([number, -number]),
        "pair": np.array(number // 2),
    }


def made_table(
    *, packed: bool = False, tier: str | None = None, late: bool = False, **options: Any
) -> gear.Table:
    """A table of some trajectories; with the path of a disk tier, every second of them lies there only. Of two in three
    the late column, if there is one, is filled."""
    schema = {
        "value": gear.Column(torch.float32, (5,)),
        "number": gear.Column(torch.int64),
        "task": gear.Column(torch.int64, (2,), per="trajectory"),
        "pair": gear.Column(torch.int64, per="trajectory"),
    }
    if late:
        schema["score"] = gear.Column(torch.float16, (3,), late=True)
    sizes: dict[str, Any] = {"max_steps": 80, "max_trajectories": 30, "block_steps": 4}
    if tier is not None:  # with room for all, so that nothing moves by itself
        sizes.update(max_blocks=200, disk=gear.Disk(tier, sync_seconds=1e6, size="1GiB", keep="newest"))
    sizes |= {"packed": packed, "on_full": "evict_oldest", **options}
    table = gear.Table.create(schema, **nested_table(sizes))
    for number in range(FIRST):
        slot = table.add(rows_of(number), priority=1.0 + number % 3)
        if late and number % 3:
            fill_score(table, slot)
    if tier is not None:
        spill_some(table, tier)
    return table


def fill_score(table: gear.Table, slot: int, generation: int | None = None) -> None:
    """Fill the late column of a trajectory by its number, if it is still there."""
    if generation is None:
        generation = int(table._engine.index.arrays.generation[slot])
    try:
        values = table[slot]["number"]
    except StaleIndexError:
        return
    score = torch.stack((values % 1000, -values % 1000, values % 7), 1).half()
    table.fill([slot], generation=[generation], score=[score])


def spill_some(table: gear.Table, tier: str) -> None:
    """Move every second trajectory to disk only, as far as nobody reads those that were moved before."""
    table.save(tier)
    slots = table.indices()[::2]
    table._engine.index.spill(slots, table._engine.index.arrays.generation[slots].copy())


class Elsewhere(Region):
    """The region of a table in the memory of a device, as another process has it."""

    def __init__(self, region: Region) -> None:
        region._mapping.users += 1
        super().__init__(region._mapping, region.layout, region.name)
        self._client, memory = ClientHere(region.layout, (0, 0), "table"), region.device_memory
        assert memory is not None
        self._client.server = server = BlockServer.__new__(BlockServer)
        server._memory, server._layout, server._names = memory, region.layout, list(region.layout.schema)

    device_memory = property(lambda self: None)  # type: ignore[assignment]

    def block_client(self) -> BlockClient:
        return self._client

    def pin(self, device: torch.device | None = None, *, wait: bool = True) -> bool:
        return False


class ClientHere(BlockClient):
    """The blocks, whose owner answers at once."""

    server: BlockServer

    def connect(self) -> None:
        """It is there."""

    def _room(self, count: int) -> Any:
        self._rows = np.zeros(count, dtype=np.uint8)
        return self._rows

    def _ask(self, numbers: tuple[int, int, int]) -> None:
        self.server.answer(self._rows, numbers)


class Run:
    """A scenario under one schedule.

    Args:
        scenario: what happens.
        seed: decides when.
        policy: see `Machine`.

    Attributes:
        cuda: the stand-in, with its counts; among them "staged" batches, of which rows were read from
            disk into staging memory, and "both kinds" of collectors: the host gathers until the table is pinned.
    """

    def __init__(self, scenario: Scenario, seed: int, policy: Policy, *, ordered: bool = True) -> None:
        self.scenario, self.choose = scenario, random.Random(f"consumer {seed}")
        self.cuda = Cuda(seed, policy)
        self.cuda.machine.checks_order = ordered
        self.expected: dict[tuple[int, int], dict[str, Any]] = {}
        self.kinds: set[bool] = set()  # whether the device reads the table, of collectors seen
        self.num_taken = 0
        self._updates: list[tuple[dict[str, Any], int]] = []
        self._updated = 0
        self._asking = 0
        self._draw_twin: Callable[[Any], dict[str, Any]]

    def run(self) -> None:
        """Raise an error if anything goes wrong."""
        self.cuda.refuse_pinning = not self.scenario.pinned
        with contextlib.ExitStack() as stack, collected_on_request():
            tier = stack.enter_context(tempfile.TemporaryDirectory()) if self.scenario.tier else None
            with self.cuda.installed(), self._mode(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(PackedCuda, "_read", self._counted(PackedCuda._read))
                patch.setattr(BatchesAhead, "next", self._expecting(BatchesAhead.next))
                if self.scenario.draws:
                    patch.setattr(uniform_cuda, "LEAST_ROWS", 1)
                    patch.setattr(uniform_cuda, "STANDING", 1)
                options: dict[str, Any] = {"packed": self.scenario.packed, "late": self.scenario.late}
                if self.scenario.on_gpu:
                    options["device"] = DEVICE
                self.owner = table = made_table(tier=tier, **options)
                self.tier = tier
                try:
                    if self.scenario.pinning:
                        waits = SAMPLERS[self.scenario.sampler]().by_priority
                        batches = 0 if waits else self.choose.choice([1, 2])
                        self.cuda.may_pin = lambda: self.num_taken >= batches
                        table.pin(DEVICE, wait=False)
                    if self.scenario.attached:
                        with gear.Table(Elsewhere(table._engine.region)) as attached:
                            self._consume(attached)
                            self.cuda.threads.finish()
                    else:
                        self._consume(table)
                    gc.collect()
                finally:
                    self.cuda.threads.finish()
                    table.close()
            self.cuda.machine.counts["both kinds"] = int(len(self.kinds) == 2)
            self.cuda.check()

    def _counted(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.cuda.machine.counts["staged"] += 1
            return stage(*args)

        return counted

    def _expecting(self, next_here: Callable[..., Any]) -> Callable[..., Any]:
        """Let the CPU draw a batch that was queued ahead at the moment of its own turn."""

        def expecting(ahead: BatchesAhead, item: Any) -> Any:
            expected = self._draw_twin(item[0]) if ahead._ready or ahead._unchanged >= STANDING else None
            found = next_here(ahead, item)
            if found is not None:
                assert expected is not None
                self.cuda.machine.counts["ahead"] += 1
                self.expected[item[0].epoch, item[0].step] = expected
            return found

        return expecting

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.scenario.mode == "inference":
                stack.enter_context(torch.inference_mode())
            if self.scenario.mode == "default device":
                stack.enter_context(torch.device(self.choose.choice(["cuda:0", "cuda:1"])))
            yield

    def _between_batches(self) -> None:
        if self.scenario.mode == "device":
            torch.cuda.set_device(self.choose.choice([0, 1]))
        if self.scenario.mode == "capture" and self.choose.random() < 0.5:
            with self.cuda.capturing():
                for _ in range(self.choose.choice([1, 3])):
                    self.cuda.threads.switch()

    def _asked(self, call: Callable[[], Any]) -> Any:
        """What a call of ours returns. What others do elsewhere they may do in it, and only in it."""
        if not self.scenario.mode.endswith("elsewhere"):
            return call()
        self.cuda.set_mode(GLOBAL)
        self._asking += 1
        try:
            return call()
        finally:
            self._asking -= 1
            self.cuda.set_mode(RELAXED)

    def _batches(self, data: gear.ReplayDataset) -> Iterator[Any]:
        batches = iter(data)
        return iter(lambda: self._asked(lambda: next(batches, None)), None)

    def _capture(self) -> None:
        """The thread that captures elsewhere."""
        while True:
            self.cuda.threads.wait(lambda: self._asking > 0)
            with self.cuda.capturing():
                for _ in range(self.choose.choice([1, 3])):
                    self.cuda.threads.switch() or self.cuda.machine.step()

    def _launch(self) -> None:
        """The thread that launches elsewhere: on a stream of PyTorch's pool, one piece of work after another."""
        stream: Any = torch.cuda.Stream(DEVICE)
        with torch.cuda.stream(stream):
            made = torch.zeros(4, device=DEVICE)
            while True:
                last = stream.last
                self.cuda.threads.wait(lambda: self._asking > 0 and last.done)  # noqa: B023
                made.add_(1)
                self.cuda.threads.switch()

    # ---------------------------------------------------------------- the consumer

    def _consume(self, table: gear.Table) -> None:
        scenario = self.scenario
        windows: dict[str, Any] = {
            "value": gear.Window(3, 0 if scenario.complete else -2),
            "number": gear.Window(2),
            "task": None,
        }
        sizes: dict[str, Any] = {"batch_size": BATCH, "layout": scenario.layout}
        if scenario.layout != "padded":
            windows["value"] = windows["number"] = gear.Window(20, -10)
            if scenario.budget:
                sizes |= {"batch_size": None, "max_steps": 40, "lookahead": 2}
        if scenario.converts:
            windows["half"] = gear.Window(
                windows["value"].length, windows["value"].offset, column="value", dtype=torch.bfloat16, scale=1 / 3
            )  # fmt: skip
        if scenario.late:
            windows["score"] = windows["value"]
        if scenario.pairs:
            windows["pair"] = None
            sizes |= {"group": "pair", "group_size": 2}
        data = gear.ReplayDataset(
            table,
            **nested(
                {
                    **sizes,
                    "windows": windows,
                    "sampler": SAMPLERS[scenario.sampler](),
                    "prefetch": scenario.prefetch,
                    "copy": scenario.copy,
                    "complete": scenario.complete,
                    "device": DEVICE,
                    "batches_per_epoch": None if scenario.sampler == "pass" else scenario.batches,
                    "seed": 3,
                }
            ),
        )
        self._watch(data)
        if scenario.writes:
            self.cuda.threads.start(self._write, (self.owner,), "writer")
        if scenario.mode == "captures elsewhere":
            self.cuda.threads.start(self._capture, (), "capturer")
            self.cuda.set_mode(RELAXED)
        if scenario.mode == "launches elsewhere":
            self.cuda.threads.start(self._launch, (), "launcher")
        stream = torch.cuda.Stream(DEVICE) if scenario.side else None
        read: list[tuple[tuple[int, int], dict[str, Any]]] = []
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            for epoch in range(scenario.epochs):
                held: list[tuple[tuple[int, int], Any]] = []
                early = scenario.stops or epoch + 1 < scenario.epochs
                for number, batch in enumerate(self._batches(data)):
                    self._take((epoch, number), batch, read, held, data)
                    if early and number == scenario.batches // 2:
                        break
                for key, batch in held if scenario.copy is not False else ():
                    read.append((key, cloned(batch)))
                for number in range(scenario.samples):
                    batch = self._asked(data.sample)
                    read.append(((-1, epoch * scenario.samples + number), cloned(batch)))
                held.clear()
                del batch
        self._updates.clear()
        if scenario.drops:
            del data
            gc.collect()
        torch.cuda.synchronize(DEVICE)
        check = compare_grown if scenario.grows else compare
        for key, batch in read:
            check(key, {name: on_host(value) for name, value in batch.items()}, self.expected[key])
            if scenario.pairs and not scenario.budget:
                pairs = on_host(batch["pair"]).view(-1, 2)
                if not torch.equal(pairs[:, 0], pairs[:, 1]):
                    raise Mismatch(f"batch {key} has pairs {pairs}; expected two of each")

    def _take(self, key: Any, batch: Any, read: Any, held: Any, data: Any) -> None:
        """What a training step does with a batch."""
        scenario = self.scenario
        self._between_batches()
        self.num_taken += 1
        self.kinds |= {collector.zero_copy for collector in data._buffers.collectors}
        if scenario.mode == "inference" and batch["value"].is_inference():
            raise Mismatch(f"batch {key} is an inference tensor: it cannot be trained on")
        read.append((key, cloned(batch)))
        # Without copies a batch may be read until `keep` more have been requested.
        most = scenario.hold if scenario.copy is not False else min(scenario.hold, data.keep - 1)
        if most:
            held.append((key, batch))
            if len(held) > most:
                old, kept = held.pop(0)
                read.append((old, cloned(kept)))
        if scenario.updates and self.choose.random() < 0.8:
            number = len(self._updates) + self._updated
            priority = priorities(batch, number, self._by_index)
            if number % 3 == 0:
                priority = priority.half()
            if scenario.updates == "host":
                priority = priority.cpu()
            self._updates.append((self.expected[key], number))
            self._asked(lambda: data.update_priority(batch, priority))
            priority.fill_(-1.0)  # it is the caller's again
        if scenario.looks and self.choose.random() < 0.3:
            self._asked(data.state_dict)
            if data.sampler.by_priority:
                assert self._asked(lambda: data.num_stale) >= 0

    # ---------------------------------------------------------------- the other thread

    def _write(self, table: gear.Table) -> None:
        pace: float = self.choose.choice([1, 3, 6])  # trajectories a batch
        if self.scenario.calm:
            pace = 1 / 17
        for number in range(self.scenario.writes):
            self.cuda.threads.wait(lambda: len(self.expected) * pace > number)  # noqa: B023
            rows, priority = rows_of(FIRST + number), 1.0 + number % 3
            if self.scenario.grows:
                self._grow(table, rows, priority)
            else:
                table.add(rows, priority=priority)
                if self.tier is not None and number % 4 == 0:
                    spill_some(table, self.tier)
                if self.tier is not None and number % 4 == 2:  # some of them come back
                    table._engine.load_from_disk(table.indices()[::3])
                if self.scenario.late:  # the newest of them, and the oldest, which may lie on disk
                    waiting = list(zip(*(part.tolist() for part in table.unfilled("score")), strict=True))
                    for slot, generation in {waiting[0], waiting[-1]} if waiting else ():
                        fill_score(table, slot, generation)
            self.cuda.threads.switch()

    def _grow(self, table: gear.Table, rows: dict[str, Any], priority: float) -> None:
        with table.writer(commit_every_step=True) as writer:
            writer.priority = priority
            writer.trajectory = {"task": rows["task"], "pair": rows["pair"]}
            for value, number in zip(rows["value"], rows["number"], strict=True):
                writer.append({"value": value, "number": number})
                if self.choose.random() < 0.5:
                    self.cuda.threads.switch()
            writer.commit()

    # ---------------------------------------------------------------- what is expected

    @property
    def _by_index(self) -> bool:
        """Whether the values of a row are not at one place, or not known at the draw."""
        return self.scenario.grows or self.scenario.layout != "padded"

    def _watch_plans(self, data: gear.ReplayDataset) -> None:
        """At each gather of a batch of so many steps, gather the same rows on the CPU."""
        collector = collector_for(
            TableSource(self.owner),
            data.windows,
            device=torch.device("cpu"),
            packed=True,
            weighs=data.sampler.weighs,
        )
        plans_here, filler_here, epochs = data._plans, data.filler, [0]

        def plans(budget: Any, epoch: int, *args: Any) -> Any:
            epochs[0] = epoch
            return plans_here(budget, epoch, *args)

        def filler(prefetcher: Any) -> Any:
            here = filler_here(prefetcher)
            fill_here = here.fill_planned

            def fill_planned(buffers: Any, plan: Any) -> int:
                own = collector.buffers()
                collector.gather(own, plan.rows)
                self.expected[epochs[0], plan.state.number - 1] = cloned(own.rows(len(plan.rows)))
                return fill_here(buffers, plan)

            here.fill_planned = fill_planned  # type: ignore[method-assign]
            return here

        data._plans, data.filler = plans, filler  # type: ignore[method-assign]

    def _watch(self, data: gear.ReplayDataset) -> None:
        """At each draw and each update, let a CPU selection of the same table do the same."""
        if self.scenario.layout != "padded" and self.scenario.budget:
            self._watch_plans(data)
            return
        selection = data._selected()
        twin = Origin(data.table, gear.Ranks()).selection(
            selection.context, history=9, device=torch.device("cpu"), windows={}
        )
        packed = self.scenario.layout != "padded"
        collector = collector_for(
            TableSource(self.owner),
            data.windows if packed else expand(data.table.schema, data.windows)[0],
            batch_size=BATCH,
            device=torch.device("cpu"),
            packed=packed,
            weighs=data.sampler.weighs,
        )
        draw_here = selection.draw

        def draw(draw: Any, ticket: Any, frozen: Any = None) -> Any:
            own = Ticket()
            rows = twin.draw(draw, own, frozen)
            made = draw_here(draw, ticket, frozen)
            buffers = collector.buffers()  # a gather from the memory of a device lets others run
            collector.gather(buffers, rows)
            own.end()
            batch = buffers.rows(len(rows))
            key = (draw.epoch, draw.step) if draw.epoch < 1 << 16 else (-1, draw.step)
            self.expected[key] = {name: cloned(value) for name, value in batch.items()}
            return made

        def draw_twin(given: Any) -> dict[str, Any]:
            own = Ticket()
            rows = twin.draw(given, own)
            buffers = collector.buffers()
            collector.gather(buffers, rows)
            own.end()
            return {name: cloned(value) for name, value in buffers.rows(len(rows)).items()}

        self._draw_twin = draw_twin
        queue_here, by_priority = selection.queue, isinstance(selection, PrioritizedSelection)

        def queue(given: Any, batch: Any, ticket: Any) -> bool:
            # As it finds itself: the twin below would look anew.
            if not by_priority and data.table._engine.reader().known() is None:
                return False
            expected = draw_twin(given)
            done = queue_here(given, batch, ticket)
            if done:
                self.cuda.machine.counts["queued"] += 1
                key = (given.epoch, given.step) if given.epoch < 1 << 16 else (-1, given.step)
                self.expected[key] = expected
            return done

        selection.draw, selection.queue = draw, queue  # type: ignore[method-assign]
        if not isinstance(selection, PrioritizedSelection):
            return
        on_gpu = isinstance(selection, CudaPrioritizedSelection)
        owner: Any = selection if on_gpu else selection.priorities
        name = "_queue_update" if on_gpu else "update"
        update_here = getattr(owner, name)

        def update_twin() -> None:
            batch, number = self._updates.pop(0)
            self._updated += 1
            twin.update_priority(  # type: ignore[attr-defined]
                batch["index"],
                priorities(batch, number, self._by_index),
                generation=batch["generation"],
                anchor=batch["anchor"] if selection.context.sampler.unit == "step" else None,
                stale="ignore",
                between=lambda call: call(),
            )

        def update(*args: Any) -> None:
            update_twin()
            update_here(*args)

        setattr(owner, name, update)
        if isinstance(selection, CudaPrioritizedSelection):
            again, mutex = selection.queue_update, selection.priorities.mutex

            def queue_again(*parts: Any) -> bool:
                with mutex:
                    if done := again(*parts):
                        self.cuda.machine.counts["queued updates"] += 1
                        update_twin()
                return done

            selection.queue_update = queue_again  # type: ignore[method-assign]


def priorities(batch: Any, number: int, by_index: bool) -> torch.Tensor:
    """New priorities of a batch, float32 [n]; of its values, so that they are wrong if it is, or of its indices."""
    if by_index:
        return ((batch["index"] * 7 + number) % 11 + 1).float()
    return ((batch["number"][:, 0] * 7 + batch["anchor"] * 3 + number) % 11 + 1).float()


def cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: cloned(part) for name, part in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def compare(key: Any, found: Any, expected: Any) -> None:
    """Fail unless a batch is the expected one; weights may differ by rounding."""
    for name, value in expected.items():
        if isinstance(value, dict):
            compare(key, found[name], value)
        elif name == "priority_weight":
            if not torch.allclose(found[name], value, rtol=1e-5):
                raise Mismatch(f"batch {key}: {name} is {found[name]}; expected {value}")
        elif (
            found[name] != value
            if not isinstance(value, torch.Tensor)
            else not torch.equal(found[name], value)
        ):
            raise Mismatch(f"batch {key}: {name} is {found[name]}; expected {value}")


def compare_grown(key: Any, found: Any, expected: Any) -> None:
    """Fail unless a batch has the expected trajectories, or more of their steps than at the draw."""
    for name in ("index", "generation", "task"):
        compare(key, {name: found[name]}, {name: expected[name]})
    trajectory, anchor = found["task"][:, 0, None], found["anchor"][:, None]
    steps = torch.arange(2, device="cpu")
    mask, before = found["mask"]["number"], expected["mask"]["number"]
    right = torch.where(mask, 100 * trajectory + anchor + steps, 0)
    same_anchor = found["anchor"] == expected["anchor"]
    if not torch.equal(found["number"], right) or (before & ~mask)[same_anchor].any():
        raise Mismatch(f"batch {key}: number is {found['number']}, mask {mask}; expected {right}")
    mask = found["mask"]["value"][:, :, None]
    if not torch.equal(
        found["value"], torch.where(mask, trajectory[:, :, None].float(), 0.0).expand(-1, -1, 5)
    ):
        raise Mismatch(f"batch {key}: value is {found['value']} of {trajectory}")

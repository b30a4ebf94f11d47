"""Ways of selecting by priority that `select` and `online` measure, and how they are found to draw what they should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.harness import Incorrect
from benchmarks.peers.catalog import peers_of
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.select import ALPHA, BETA, Subject, chunks, measure, priorities, weighed
from gear_loader.selection.tree import PriorityTree

_SEED = 11
_FAR = 8.0  # standard deviations of a chi-square: farther than chance goes


class Biased(Incorrect):
    """Draws are not in proportion: by this part a bin of items is drawn too often or too seldom, beyond chance."""

    def __init__(self, message: str, deviation: float) -> None:
        super().__init__(message)
        self.deviation = deviation


class Truth:
    """The priorities that all variants start with, and how often items should be drawn."""

    def __init__(self, items: int, seed: int) -> None:
        self.items, self.seed = items, seed
        self.priorities = priorities(items, seed)
        self._shares: dict[float, tuple[float, dict[str, np.ndarray]]] = {}

    def check(self, subject: Subject, batches: Sequence[int], draws: int) -> None:
        """Compare many draws with the priorities, then change some of these, look again, and put them back."""

        def update(items: np.ndarray, values: np.ndarray) -> None:
            subject.update(subject.chosen(items), subject.values(values))

        total, shares = self._expected(subject.power)
        items, leaves = draw_many(subject, batches, draws)
        check_draws(items, leaves, self.items)
        if leaves is not None:
            expected = weighed(self.priorities[items], subject.power)
            if not np.allclose(leaves, expected, rtol=1e-5):
                raise Incorrect("items do not weigh what their priorities say")
        biases = []
        for name, share in shares.items():
            found = np.bincount(self._bins(items)[name], minlength=len(share))
            biases.append(_chi_square(found, share, name))

        # A few items that weigh as much as all others together.
        few = np.random.default_rng(_SEED).choice(self.items, min(64, self.items // 2), replace=False)
        few.sort()
        before = self.priorities[few]
        rest = total - weighed(before, subject.power).sum()
        update(few, np.full(len(few), (rest / len(few)) ** (1 / subject.power), dtype=np.float32))
        items, _ = draw_many(subject, batches, draws)
        update(few, before)
        place = np.searchsorted(few, items).clip(max=len(few) - 1)
        hits = few[place] == items
        share = np.full(len(few) + 1, 0.5 / len(few))
        share[-1] = 0.5
        found = np.bincount(np.where(hits, place, len(few)), minlength=len(share))
        biases.append(_chi_square(found, share, "items whose priorities were set"))
        worst = max(biases, key=lambda bias: -1.0 if bias is None else bias.deviation)
        if worst is not None:
            raise worst

    def _expected(self, power: float) -> tuple[float, dict[str, np.ndarray]]:
        """What all items weigh together, and the share of each bin."""
        if power not in self._shares:
            sums = {name: np.zeros(count) for name, count in _BINS.items()}
            for part in chunks(self.items):
                leaves = weighed(self.priorities[part], power)
                for name, places in self._bins(np.arange(part.start, part.stop)).items():
                    sums[name] += np.bincount(places, weights=leaves, minlength=len(sums[name]))
            total = float(sums["positions"].sum())
            self._shares[power] = total, {name: values / total for name, values in sums.items()}
        return self._shares[power]

    def _bins(self, items: np.ndarray) -> dict[str, np.ndarray]:
        """The bin of each item: by position, which the upper levels of a tree decide; by the last five bits, which
        its leaves do; and by priority."""
        levels = np.minimum((self.priorities[items] * 16).astype(np.int64), 15)
        return dict(zip(_BINS, (items * 64 // self.items, items % 32, levels), strict=True))


_BINS = {"positions": 64, "positions within 32": 32, "priorities": 16}


def check_draws(items: np.ndarray, leaves: np.ndarray | None, count: int) -> None:
    """Raise `Incorrect` unless all items exist and weigh something."""
    outside = (items < 0) | (items >= count)
    if outside.any():
        raise Incorrect(f"item {items[outside][0]} was drawn, of {count}")
    if leaves is not None and not (np.asarray(leaves) > 0).all():
        raise Incorrect("an item that weighs nothing was drawn")


def _chi_square(found: np.ndarray, share: np.ndarray, what: str) -> Biased | None:
    keep = share > 0
    if found[~keep].any():
        raise Incorrect(f"{what}: items were drawn that weigh nothing")
    expected = share[keep] * found.sum()
    distance = float(((found[keep] - expected) ** 2 / expected).sum())
    freedom = int(keep.sum()) - 1
    most = freedom + _FAR * (2 * max(freedom, 1)) ** 0.5
    if distance <= most:
        return None
    surplus = (np.abs(found[keep] - expected) - 4 * np.sqrt(expected)) / expected
    deviation = max(0.0, float(surplus.max()))
    return Biased(
        f"{what}: draws are not in proportion to the weights, by up to {deviation:.0%} in {len(share)} bins "
        f"(chi-square {distance:.0f} of {freedom} degrees of freedom, {found.sum()} draws)",
        deviation,
    )


class TreeSubject(Subject):
    """`PriorityTree`: what the CPU path draws with and sets leaves in."""

    item_bytes = 6

    def __init__(self, truth: Truth, *, extremes: bool = False) -> None:
        self.items = truth.items
        self._tree = PriorityTree(truth.items, extremes=extremes)
        self._tree.leaves[: truth.items] = truth.priorities
        self._tree.build()
        self._step = 0

    def draw(self, batch: int) -> Any:
        self._step += 1
        return self._tree.draw(batch, key=_SEED, step=self._step)

    def update(self, drawn: Any, values: Any) -> None:
        self._tree.update(drawn[0], values)


class OnDevice(Subject):
    """What it takes and gives are tensors on a device. dtype: of priorities."""

    dtype = torch.float32

    def __init__(self, truth: Truth, device: str | torch.device = "cpu") -> None:
        self.items, self.device = truth.items, torch.device(device)

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        return drawn[0].cpu().numpy().copy(), drawn[1].cpu().numpy().copy()

    def values(self, values: np.ndarray) -> Any:
        return torch.from_numpy(values).to(self.device, self.dtype)

    def chosen(self, items: np.ndarray) -> Any:
        return torch.from_numpy(items).to(self.device), None

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class DatasetSubject(OnDevice):
    """`ReplayDataset.sample` and `update_priority`, end to end.

    A table of trajectories of one step with one int32 column. Includes following the table, drawing, importance
    weights against the table's least priority, gathering the batch (the column, mask, index, generation, anchor), and
    for updates the checks of values and generations and raising to alpha.
    """

    item_bytes = 700
    power = ALPHA

    def __init__(self, truth: Truth, device: str | torch.device = "cpu") -> None:
        super().__init__(truth, device)
        count = truth.items
        self._table = gear.Table.create(
            {"x": gear.Column(torch.int32, ())}, max_steps=count, max_trajectories=count, block_steps=1
        )
        for part in chunks(count):
            values = torch.arange(part.start, part.stop, dtype=torch.int32)[:, None]
            lengths = np.ones(len(values), dtype=np.int64)
            self._table.extend({"x": values}, lengths=lengths, priority=truth.priorities[part])
        self._dataset = self._made(gear.Prioritized(alpha=ALPHA, beta=BETA, normalize="table"))
        slots = self._table.indices()
        generations = self._table._engine.reader().slot_states()[1][slots]
        self._index, self._generations = (torch.from_numpy(a).to(self.device) for a in (slots, generations))
        batch = self._dataset.sample(256)
        drawn = weighed(truth.priorities[batch["index"].cpu().numpy()], ALPHA)
        expected = (weighed(truth.priorities.min(), ALPHA) / drawn) ** BETA
        if not np.allclose(batch["priority_weight"].cpu().numpy(), expected, rtol=1e-4):
            raise Incorrect("the importance weights differ")

    def _made(self, selector: gear.Prioritized, batch: int = 1024) -> gear.ReplayDataset:
        options: dict[str, Any] = {
            "draws": gear.Draws(anchor="first"),
            "device": self.device,
            "prefetch": gear.Prefetch(0, copy=False),
        }
        windows = gear.Window(1)
        return gear.ReplayDataset(self._table, batch_size=batch, windows=windows, sampler=selector, **options)

    def draw(self, batch: int) -> Any:
        return self._dataset.sample(batch)

    def update(self, drawn: Any, values: Any) -> None:
        self._dataset.update_priority(drawn["index"], values, generation=drawn["generation"])

    def found(self, drawn: Any) -> tuple[np.ndarray, np.ndarray | None]:
        if not torch.equal(drawn["x"][:, 0].long(), drawn["index"]):
            raise Incorrect("the rows are not those of the items drawn")
        return drawn["index"].cpu().numpy().copy(), None

    def chosen(self, items: np.ndarray) -> Any:
        places = torch.from_numpy(items).to(self.device)
        return {"index": self._index[places], "generation": self._generations[places]}

    def close(self) -> None:
        self._table.close()


class Multinomial(OnDevice):
    """`torch.multinomial`, which refuses more than 2**24 items; an update is a plain assignment.

    In float64: in float32, of 10^7 items the sixteenth with the lowest priorities is drawn five times too seldom.
    """

    item_bytes = 32
    dtype = torch.float64

    def __init__(self, truth: Truth, device: str | torch.device = "cpu") -> None:
        super().__init__(truth, device)
        self._leaves = self.values(truth.priorities.copy())

    def draw(self, batch: int) -> Any:
        items = self._items(batch)
        return items, self._leaves[items]

    def _items(self, batch: int) -> torch.Tensor:
        return torch.multinomial(self._leaves, batch, replacement=True)

    def update(self, drawn: Any, values: Any) -> None:
        self._leaves[drawn[0]] = values

    def leaves(self, items: torch.Tensor) -> torch.Tensor:
        return self._leaves[items]


class CumsumTorch(Multinomial):
    """`cumsum` over all items at each draw, in float64 (float32 does not tell 10^8 of them apart), and a search."""

    item_bytes = 16
    dtype = torch.float32

    def __init__(self, truth: Truth, device: str | torch.device = "cpu") -> None:
        super().__init__(truth, device)
        self._sums = torch.empty(self.items, dtype=torch.float64, device=self.device)

    def _items(self, batch: int) -> torch.Tensor:
        torch.cumsum(self._leaves, 0, dtype=torch.float64, out=self._sums)
        mass = torch.rand(batch, dtype=torch.float64, device=self.device) * self._sums[-1]
        return torch.searchsorted(self._sums, mass, right=True).clamp_(max=self.items - 1)


class Peer(Subject):
    """A variant in another process, which also times it; draws and updates from here are for checks."""

    def __init__(self, process: PeerProcess, variant: str, truth: Truth) -> None:
        self._process = process
        self.power = float(peers_of("select")[variant].power)
        self.items = truth.items
        process.ask("build", items=truth.items, seed=truth.seed)

    def draw(self, batch: int) -> Any:
        return self.draws(batch, 1)

    def draws(self, batch: int, times: int) -> tuple[np.ndarray, np.ndarray | None]:
        """So many batches, one after another in one array."""
        found = self._process.ask("draw", batch=batch, times=times)
        leaves = found["leaves"]
        return np.array(found["items"], dtype=np.int64), None if leaves is None else np.array(leaves)

    def update(self, drawn: Any, values: Any) -> None:
        self._process.ask("update", items=drawn[0].tolist(), priorities=values.tolist())

    def measure(self, operation: str, batch: int, batches: int) -> float:
        seconds = self._process.ask("measure", operation=operation, batch=batch, batches=batches)["seconds"]
        return float(seconds)


def timed_by(subject: Subject, seed: int) -> Callable[[str, int, int], float]:
    """How it is timed: here, in another process, or on a device's own clock; see `peers.select.measure`."""
    random = np.random.default_rng(seed)
    here = lambda operation, batch, batches: measure(subject, operation, batch, batches, random)  # noqa: E731
    return getattr(subject, "measure", here)


def draw_many(subject: Subject, batches: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray | None]:
    """About so many items, in batches of all these sizes."""
    found: list[tuple[np.ndarray, np.ndarray | None]] = []
    for batch in batches:
        times = max(1, count // len(batches) // batch)
        if isinstance(subject, Peer):
            found.append(subject.draws(batch, times))
        else:
            found += [subject.found(subject.draw(batch)) for _ in range(times)]
    leaves = [part[1] for part in found if part[1] is not None]
    return np.concatenate([part[0] for part in found]), np.concatenate(leaves) if leaves else None

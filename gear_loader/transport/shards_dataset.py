"""`ReplayDataset` over several tables, of servers or of this machine, without ranks that draw together.

Each row of a batch belongs to a shard with the probability of that shard's mass, its number of items or its sum of
powers of priorities, and is drawn there as from one table. So a row is drawn with the probability that it would have in
one table of all rows, by the masses that the shards tell right before the draw; what they add or remove between that
and their draw counts for the next batch. Groups are drawn so in place of rows, each whole out of one shard.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NoReturn

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.windows import has_whole, steps_only
from gear_loader.dataset import ReplayDataset
from gear_loader.dataset.mixture import joined
from gear_loader.dataset.options import Ranks
from gear_loader.errors import GearError, SchemaError, StaleIndexError, TableEmptyError
from gear_loader.selection.random import raw, uniforms
from gear_loader.selection.samplers import SAMPLE_EPOCH, Prioritized, Uniform
from gear_loader.selection.weights import checked_leaves
from gear_loader.storage.priority_updates import is_strict, request
from gear_loader.storage.ragged import size_of
from gear_loader.storage.schema import as_mapping
from gear_loader.transport.remote_dataset import RemoteDataset, RemoteOrigin, moved
from gear_loader.utils.arrays import Array
from gear_loader.utils.captures import refuse_capture
from gear_loader.utils.mutex import new_mutex
from gear_loader.utils.waiting import Backoff

_SHARDS, _SEEDS = 0x73686172, 0x73656564  # streams of random numbers: shards of rows, seeds of shards
_ITERATION, _SAMPLE = 0, 1  # streams of batches
_LONGEST = 0.1  # seconds between two looks at empty shards


class ShardsOrigin(RemoteOrigin):
    """What a dataset over several tables draws from."""

    def check(self, **options: Any) -> None:
        sampler, layout, steps = (options[name] for name in ("sampler", "layout", "steps"))
        drawn = isinstance(sampler, (Uniform, Prioritized)) and sampler.replacement
        if not drawn or sampler.freshness < 1 or steps is not None or layout == "jagged":
            raise SchemaError(
                f"{sampler!r}, layout={layout!r} and batch_size={steps or 'rows'} were given with several shards; "
                "expected Uniform or Prioritized with replacement and without freshness, a layout but 'jagged', "
                "and a batch_size in rows. For passes over all trajectories let each rank own one shard: "
                "gear_loader.distributed.Shards; or make a dataset of each of `tables`."
            )

    def set(self, rows: Mapping[str, Any], mask: Any, columns: Mapping[str, Any], *, strict: bool) -> int:
        raise SchemaError(
            "set() was called on a dataset over several shards; expected `tables[number].set(...)` of each shard."
        )


class ShardsDataset(RemoteDataset):
    """A `ReplayDataset` over several tables; made by ``ReplayDataset(gear_loader.connect("ray://replay"), ...)``.

    Batches also have ``shard``, int64 ``[B]``: the number of each row's table. Rows lie shard by shard. Draws of
    different ranks and datasets are independent. While a shard does not answer, draws wait for it, at most the timeout
    of its connection.
    """

    def learn(self) -> None:
        """Make a dataset of each table."""
        if has_whole(self.windows) and self.layout == "padded":
            raise SchemaError(
                "Whole trajectories were asked for from several shards; expected layout='packed' with them."
            )
        shards: Any = self.table
        rank, world = self._origin.rank()
        draws = self._given["draws"]
        if self.sampler.weighs:
            draws = dataclasses.replace(draws, sample_info=True)
        options = self._given | {"sampler": self.sampler, "draws": draws, "batches_per_epoch": math.inf}
        options |= {"device": "cpu", "prefetch": 0, "ranks": Ranks(rank=0, world_size=1)}
        options |= {"output": "dict", "transform": None}
        # Equal seeds would give all shards the same random numbers.
        seeds = raw(len(shards.tables), seed=self.seed, stream=_SEEDS, epoch=0, step=0) >> np.uint64(1)
        self._parts = [
            ReplayDataset(table, **{**options, "seed": int(seed)})
            for table, seed in zip(shards.tables, seeds, strict=True)
        ]
        self._asking = ThreadPoolExecutor(len(self._parts), "gear-loader-shards")
        self._ahead = ThreadPoolExecutor(1, "gear-loader-shards")
        self._process, self._guards = os.getpid(), [new_mutex() for _ in self._parts]
        self._turn, self._rank_of = new_mutex(), (rank, world)
        self._turn_number = 0  # of the running iteration

    # ---------------------------------------------------------------- batches

    def _iterate(self, number: int, workers: int, *, in_worker: bool) -> Generator[Batch]:
        refuse_capture(self.device, "a batch")
        most, position = self.batches_per_epoch, self._position
        if most is None:
            raise SchemaError(
                "batches_per_epoch is None; expected a number, or math.inf: draws over several shards are no passes."
            )
        epoch, before, step = position.begin(lambda call: call())
        turn = self._turn_number = self._turn_number + 1
        first = position.past if most == math.inf else epoch * int(most)
        asked: collections.deque[Future[Batch]] = collections.deque()
        ordered, largest = step, self._told_bytes
        try:
            while step < most:
                if turn != self._turn_number:
                    raise SchemaError(
                        "An iteration went on after a later one of the same dataset had begun; expected one at a "
                        "time. Make two datasets."
                    )
                while ordered < most and len(asked) <= self._batches_ahead(largest):
                    asked.append(
                        self._ahead.submit(self._batch_of, first + ordered, _ITERATION, self.batch_size)
                    )
                    ordered += 1
                received = asked.popleft().result()
                largest = max(largest, size_of(received, other=0))
                step += 1
                position.delivered(epoch, before, step)
                yield self._shown(moved(received, self.device), epoch, step - 1, self)  # type: ignore[arg-type]
            position.end(epoch)
        finally:
            for each in asked:
                each.cancel()

    @property
    def _told_bytes(self) -> int:
        return max((part._told_bytes for part in self._parts if isinstance(part, RemoteDataset)), default=0)

    def sample(self, batch_size: int | None = None) -> Batch:
        """See `ReplayDataset.sample`."""
        with self._buffers.turn:
            refuse_capture(self.device, "a batch")
            size = self._size_of_sample(batch_size)
            number = self._position.samples
            received = self._batch_of(number, _SAMPLE, size)
            self._position.sampled(size)
            batch: Batch = self._shown(moved(received, self.device), SAMPLE_EPOCH, number, self)  # type: ignore[arg-type]
            return batch

    def _batch_of(self, number: int, stream: int, size: int) -> Batch:
        """Batch `number` of this rank, on the CPU."""
        rank, world = self._rank_of
        with self._turn:
            self._check_process()
            place = number * world + rank
            masses, leasts = self._masses()
            shares = masses / masses.sum()
            items = self._items_of(size)
            drawn = uniforms(items, seed=self.seed, stream=_SHARDS, epoch=stream, step=place)
            which = np.searchsorted(np.cumsum(shares), drawn, side="right")
            counts = np.bincount(np.minimum(which, np.flatnonzero(shares)[-1]), minlength=len(shares))
            counts *= size // items

            def draw(shard: int) -> Batch:
                self._parts[shard].seek_sample(place, 0, stream=stream)
                return self._parts[shard].sample(int(counts[shard]))

            chosen = np.flatnonzero(counts).tolist()
            parts = self._on_all(draw, chosen)
        if self.sampler.weighs:
            self._weigh(parts, shares[chosen], leasts / masses.sum(), number)
        for shard, part in zip(chosen, parts, strict=True):
            part["shard"] = torch.full((len(part["index"]),), shard, dtype=torch.int64, device="cpu")
        tree = self.layout == "tree"
        return joined(parts, list(steps_only(self.table.schema, self.windows)) if tree else None)

    def _masses(self) -> tuple[Array, Array]:
        """Mass and smallest leaf of each shard, float64 [S] each, as soon as there is something to draw.

        Raises:
            TableEmptyError: nothing came in time.
        """
        shards: Any = self.table
        waiting = Backoff(shards.timeout, longest=_LONGEST)
        while True:
            found = self._on_all(lambda shard: self._parts[shard].mass(), range(len(self._parts)))
            masses, leasts = np.array(found, dtype=np.float64).T
            if masses.sum() > 0:
                return masses, leasts
            if not waiting.sleep():
                raise TableEmptyError(
                    f"None of {len(self._parts)} shards had anything to draw for {shards.timeout:g} s; expected rows "
                    "that fit the windows and have positive priorities."
                )

    def _weigh(self, parts: Sequence[Batch], shares: Array, leasts: Array, number: int) -> None:
        """Compute the importance weights of a batch's rows from their probabilities, among the rows of all shards."""
        sampler: Any = self.sampler
        likely = [
            part["sample_info"]["probability"].double() * share
            for part, share in zip(parts, shares.tolist(), strict=True)
        ]
        least = float(leasts.min()) if sampler.least_of_table else min(float(each.min()) for each in likely)
        for part, each in zip(parts, likely, strict=True):
            part["priority_weight"] = (least / each).clamp(max=1.0).pow(sampler.beta_at(number)).float()
            if self.sample_info:
                part["sample_info"]["probability"] = each
            else:
                del part["sample_info"]

    def _on_all(self, call: Callable[[int], Any], shards: Sequence[int]) -> list[Any]:
        """Results of `call` of each of these shards, made at the same time; the first error once all have ended."""

        def alone(shard: int) -> Any:
            with self._guards[shard]:  # a call that an interrupt has left goes on
                return call(shard)

        futures = [self._asking.submit(alone, shard) for shard in shards]
        for each in futures:
            each.exception()
        return [each.result() for each in futures]

    def _on_each(self, call: Callable[[Any], Any]) -> list[Any]:
        """Results of `call` of all shards' datasets, between two draws."""
        self._check_process()
        with self._turn:
            return self._on_all(lambda shard: call(self._parts[shard]), range(len(self._parts)))

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise GearError(
                "A dataset over several shards was used in a forked child: make another one there."
            )

    def __len__(self) -> int:
        """See `ReplayDataset.__len__`."""
        if self.batches_per_epoch is None or self.batches_per_epoch == math.inf:
            raise TypeError("This ReplayDataset has no length: draws over several shards are no passes.")
        return int(self.batches_per_epoch)

    # ---------------------------------------------------------------- priorities

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        generation: Any = None,
        anchor: Any = None,
        shard: Any = None,
        stale: Literal["ignore", "error"] = "ignore",
    ) -> None:
        """See `ReplayDataset.update_priority`: of each shard; takes its turn between two draws.

        All values are checked before any shard gets them. Rows of removed trajectories only their shard knows: with
        ``stale="error"`` one that has such rows changes nothing, and the others are updated all the same.

        Args:
            shard: int64 ``[n]``, the number of each row's table, unless a whole batch is given.

        Raises:
            StaleIndexError: with ``stale="error"``; it names the shards that were not updated.
        """
        self._by_priority("update_priority")
        self._check_process()
        given = as_mapping(index)
        if isinstance(given, Mapping):
            index, generation, anchor, _ = self._names(Batch(given), generation, anchor, shard)
            shard = given.get("shard")
        if shard is None:
            raise SchemaError(
                "No shard was received; expected a whole batch, or shard= with the number of each row's table. "
                "Nothing was changed."
            )
        rows = {"index": index, "generation": generation, "anchor": anchor, "priority": priority}
        columns = {
            name: torch.as_tensor(each, device="cpu").detach()
            for name, each in rows.items()
            if each is not None
        }
        which = torch.as_tensor(shard, device="cpu")
        wrong = (which < 0) | (which >= len(self._parts))
        if any(each.shape != which.shape for each in columns.values()) or bool(wrong.any()):
            raise SchemaError(
                f"Rows of shapes { {name: list(each.shape) for name, each in columns.items()} } and shards of shape "
                f"{list(which.shape)} were received; expected one number each, and shards from 0 to "
                f"{len(self._parts) - 1}. Nothing was changed."
            )

        strict, names = is_strict(stale), {name: columns.get(name) for name in ("generation", "anchor")}
        new = request(columns["index"], columns["priority"], **names, unit=self.sampler.unit)
        checked_leaves(self.sampler, new.priorities)

        def update(number: int) -> tuple[int, StaleIndexError] | None:
            part = {name: each[which == number] for name, each in columns.items()}
            rows = part.pop("index"), part.pop("priority")
            try:
                self._parts[number].update_priority(*rows, **part, stale=stale)
            except StaleIndexError as error:
                return number, error
            return None

        with self._turn:
            found = self._on_all(update, which.unique().tolist())
        refused = [each for each in found if each is not None]
        if strict and refused:
            others = (
                "no other shard had rows" if len(refused) == len(found) else "the other shards were updated"
            )
            raise StaleIndexError(
                f"Shards {[number for number, _ in refused]} have removed trajectories of the update, and were not "
                f"changed; {others}. Shard {refused[0][0]}: {refused[0][1]}"
            ) from refused[0][1]

    def priority_quantiles(self, shares: Sequence[float]) -> NoReturn:
        raise SchemaError(
            "priority_quantiles was called on a dataset over several shards; expected one table."
        )

    @property
    def num_stale(self) -> int:
        """Number of stale rows that updates of this dataset have skipped so far."""
        return sum(self._on_each(lambda part: part.num_stale))

    def mass(self) -> tuple[float, float]:
        """See `ReplayDataset.mass`."""
        found = self._on_each(lambda part: part.mass())
        return sum(mass for mass, _ in found), min(least for _, least in found)

    def stats(self) -> dict[str, float]:
        """See `ReplayDataset.stats`; sums over the shards."""
        counts: collections.Counter[str] = collections.Counter()
        for each in self._on_each(lambda part: part.stats()):
            counts.update(each)
        return dict(counts)

    # ---------------------------------------------------------------- state

    def _config(self) -> dict[str, Any]:
        return {**ReplayDataset._config(self), "shards": len(self._parts)}

    def _selection_state(self, *, full: bool = True) -> dict[str, Any]:
        return {"parts": self._on_each(lambda part: part._selection_state())}

    def _load_selection(self, state: Mapping[str, Any]) -> None:
        parts = state.get("parts")
        if not isinstance(parts, Sequence) or len(parts) != len(self._parts):
            raise SchemaError(f"The state has no part of each of {len(self._parts)} shards.")
        with self._turn:
            self._on_all(lambda shard: self._parts[shard]._load_selection(parts[shard]), range(len(parts)))

    def settle(self) -> None:
        """Wait until the shards have executed all requests, such as priority updates."""
        self._on_each(lambda part: part.settle())

    def close(self) -> None:
        """End the running iteration and the connections. Idempotent."""
        self._turn_number += 1
        if self._process == os.getpid():
            self._ahead.shutdown(cancel_futures=True)
            self._asking.shutdown()
        for part in self._parts:
            part.close()

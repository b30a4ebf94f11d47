"""`Mixture`: batches whose rows come from several datasets in given shares."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from gear_loader.collection.batches import Batch, loader_error, refuse
from gear_loader.collection.windows import has_whole, next_of, ragged_of, timed_of
from gear_loader.dataset.mixed_batches import MixedBatches, can_mix
from gear_loader.dataset.position import Position
from gear_loader.dataset.replay_dataset import ReplayDataset
from gear_loader.errors import SchemaError
from gear_loader.selection.random import uniforms
from gear_loader.storage.ragged import Ragged
from gear_loader.utils.arrays import shown
from gear_loader.utils.background import closed_at_end
from gear_loader.utils.checks import at_least, integer, one_of

_ROWS = 0x6D697874  # random number stream of the sources of rows
Schedule = Callable[[int], Mapping[str, float]]


class Mixture(IterableDataset[Batch]):
    """Batches with rows of several datasets in given shares, for example offline and online data.

    ``Mixture({"offline": (a, 0.5), "online": (b, 0.5)}, batch_size=256)``. Each dataset draws its rows by its own
    sampler. A batch has their rows one after another, in the order of the mapping, and ``source``, int64 ``[B]``: the
    number of each row's dataset. It does not change while anything refers to it. Padded batches on the CPU, without
    transforms and ``sample_info``, are gathered right into their places; others are joined. ``index`` and
    ``generation`` are of the row's table; ``priority_weight`` is 1 in rows of a sampler that does not weigh.

    Iterate it, use ``DataLoader(mixture, batch_size=None)``, or call `sample`. Batch number, seed and options
    determine the shares and all draws, whatever the number of workers. Rows are drawn by `ReplayDataset.sample`, so
    `prefetch` of the datasets has no effect; other calls of their `sample` would change the order.

    Args:
        sources: name -> (dataset, share). Shares are positive, or 0, and are divided by their sum. The datasets have
            the same windows, layout and device, and a `batch_size`, which only `ReplayDataset.sample` uses.
        batch_size: rows of a batch, on each rank.
        batches_per_epoch: batches of an epoch on each rank, and all its workers together; ``math.inf`` never ends.
        shares: ``"exact"``: every batch has each share of its rows, to less than one row, and over all batches so far
            too. ``"expected"``: the dataset of each row is random, with the shares as probabilities.
        schedule: function of the number of batches so far (over all epochs) that returns name -> share, for every
            source; in place of the shares in `sources`.
        seed: seed of ``"expected"``.

    Raises:
        SchemaError: invalid options, or datasets that do not fit together.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[ReplayDataset, float]],
        *,
        batch_size: int,
        batches_per_epoch: float = math.inf,
        shares: Literal["exact", "expected"] = "exact",
        schedule: Schedule | None = None,
        seed: int = 0,
    ) -> None:
        self.sources = _checked_sources(sources)
        self.batch_size = at_least("batch_size", batch_size)
        endless = isinstance(batches_per_epoch, float) and batches_per_epoch == math.inf
        self.batches_per_epoch = (
            batches_per_epoch
            if endless
            else at_least("batches_per_epoch", batches_per_epoch, otherwise=" or math.inf")
        )
        one_of("shares", shares, ("exact", "expected"))
        if schedule is not None and not callable(schedule):
            raise SchemaError(
                f"schedule is {shown(schedule)}; expected a function of the number of batches, or None."
            )
        self.shares: Literal["exact", "expected"] = shares
        self.schedule = schedule
        self.seed = integer("seed", seed)
        self._fixed = _normalized({name: share for name, (_, share) in sources.items()}, list(sources))
        self._position = Position()
        # Of iteration, and of `sample`.
        self._counted = [self._uncounted(), self._uncounted()]
        self._last: list[tuple[int, list[int]]] = [(-1, []), (-1, [])]
        self._mixed: tuple[int, MixedBatches | None] | None = None

    # ---------------------------------------------------------------- shares

    def counts(self, number: int) -> dict[str, int]:
        """Rows of each source in batch `number`, over all epochs.

        Raises:
            SchemaError: the schedule returned other names, or invalid shares.
        """
        return dict(zip(self.sources, self._rows(number, *self._given(number)), strict=True))

    def _uncounted(self) -> tuple[int, list[int], list[float]]:
        """A batch's number, rows that each source has given before, and the sum of its exact shares until then."""
        return 0, [0] * len(self.sources), [0.0] * len(self.sources)

    def _given(self, number: int, stream: int = 0) -> tuple[list[int], list[float]]:
        """Rows of each source in the batches before `number`, and the sum of its exact shares."""
        before, given, due = self._counted[stream]
        if number < before:
            before, given, due = self._uncounted()
        while before < number:
            rows = self._counts(before, stream, given, due)
            given = [one + more for one, more in zip(given, rows, strict=True)]
            shares = self._shares_at(before)
            due = [one + share * self.batch_size for one, share in zip(due, shares, strict=True)]
            before += 1
        self._counted[stream] = before, given, due
        return given, due

    def _counts(self, number: int, stream: int, given: list[int], due: list[float]) -> list[int]:
        """`_rows`; the last ones are kept, as the next batch asks for them again."""
        if self._last[stream][0] != number:
            self._last[stream] = number, self._rows(number, given, due)
        return self._last[stream][1]

    def _rows(self, number: int, given: list[int], due: list[float]) -> list[int]:
        """Rows of each source in a batch; for the arguments see `_given`."""
        shares, size = self._shares_at(number), self.batch_size
        if self.shares == "expected":
            drawn = uniforms(size, seed=self.seed, stream=_ROWS, epoch=0, step=number)
            which = np.minimum(np.searchsorted(np.cumsum(shares), drawn, side="right"), len(shares) - 1)
            rows: list[int] = np.bincount(which, minlength=len(shares)).tolist()
            return rows
        parts = zip(given, due, shares, strict=True)
        wanted = [max(rest + share * size - have, 0.0) if share else 0.0 for have, rest, share in parts]
        return _rounded(wanted, size)

    def _shares_at(self, number: int) -> list[float]:
        if self.schedule is None:
            return self._fixed
        return _normalized(self.schedule(number), list(self.sources))

    # ---------------------------------------------------------------- iteration

    def __len__(self) -> int:
        """Batches of an epoch on this rank.

        Raises:
            TypeError: `batches_per_epoch` is infinite.
        """
        self._check_prepared()
        if self.batches_per_epoch == math.inf:
            raise TypeError("This Mixture has no length: batches_per_epoch is math.inf.")
        return int(self.batches_per_epoch)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for dataset in self.sources.values():
            dataset.check_worker(number, info is not None)
        error = self._prepared_error() or loader_error(self, tensordicts=False)
        if error is not None:
            return refuse(error)
        self._position.current = self._position.next()
        return closed_at_end(self._iterate(number, workers, in_worker=info is not None))

    def _iterate(self, number: int, workers: int, *, in_worker: bool) -> Generator[Batch]:
        lock = next(iter(self.sources.values())).table._engine.region.lock
        epoch, before, step = self._position.begin(lock.run)
        # An endless iteration goes on behind those before it.
        endless = self.batches_per_epoch == math.inf
        first = self._position.past if endless else epoch * int(self.batches_per_epoch)
        while (place := before + number + workers * step) < self.batches_per_epoch:
            batch = [self._batch(first + place)]
            step += 1
            self._position.delivered(epoch, before, step)
            yield batch.pop()  # the next one may use its memory, unless the consumer refers to it
        if not in_worker:
            self._position.end(epoch)

    def sample(self) -> Batch:
        """Draw one batch outside of any epoch: batch number 0, 1, ... of a stream with separately counted shares.

        Raises:
            As `ReplayDataset.sample`, of the datasets.
        """
        batch = self._batch(self._position.samples, stream=1)
        self._position.samples += 1
        return batch

    def _batch(self, number: int, stream: int = 0) -> Batch:
        """Batch `number` over all epochs, or of `sample`."""
        before = self._given(number, stream)
        rows, given = self._counts(number, stream, *before), before[0]
        mixed = self._mixed_batches()
        if mixed is not None:
            for place, dataset in enumerate(self.sources.values()):
                dataset.seek_sample(number, given[place], stream=stream)
            return next(iter(self.sources.values())).named(mixed.batch(rows))
        parts, which = [], []
        for place, dataset in enumerate(self.sources.values()):
            count = rows[place]
            if count:
                dataset.seek_sample(number, given[place], stream=stream)
                parts.append(_drawn(dataset, count))
                which.append(torch.full((count,), place, dtype=torch.int64, device="cpu"))
        batch = joined(parts)
        if any(dataset.sampler.weighs for dataset in self.sources.values()):
            batch.setdefault("priority_weight", torch.ones_like(batch["index"], dtype=torch.float32))
        batch["source"] = torch.cat(which).to(batch["index"].device)
        return batch

    def _mixed_batches(self) -> MixedBatches | None:
        """What gathers batches in this process; None if batches of the datasets have to be joined."""
        if self._mixed is None or self._mixed[0] != os.getpid():
            datasets = list(self.sources.values())
            mixed = MixedBatches(datasets, self.batch_size) if can_mix(datasets) else None
            self._mixed = os.getpid(), mixed
        return self._mixed[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mixed": None}

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number `epoch`, from its start. Otherwise epochs count up."""
        self._check_prepared()
        self._position.set_epoch(at_least("epoch", epoch, least=0))

    def _prepared_error(self) -> str | None:
        return next(filter(None, (dataset.prepared_error() for dataset in self.sources.values())), None)

    def _check_prepared(self) -> None:
        if error := self._prepared_error():
            raise SchemaError(error)

    # ---------------------------------------------------------------- priorities and state

    def update_priority(self, batch: Mapping[str, Any], priority: Any) -> None:
        """Set the priorities of a batch's rows in the datasets that draw by priority; others are left out.

        Args:
            batch: from this mixture. priority: numbers [B], as for `ReplayDataset.update_priority`.

        Raises:
            As `ReplayDataset.update_priority`, for each dataset in turn.
        """
        values = torch.as_tensor(priority, device=None if torch.is_tensor(priority) else "cpu").detach()
        if "source" not in batch or values.shape != batch["source"].shape:
            raise SchemaError(
                f"priority has shape {list(values.shape)}; expected one number for each row of a batch of this "
                "mixture. Nothing was changed."
            )
        for place, dataset in enumerate(self.sources.values()):
            if not dataset.draws_by_priority:
                continue
            rows = (batch["source"] == place).to(values.device)
            if bool(rows.any()):
                here = rows.to(batch["index"].device)
                names = {"generation": batch["generation"][here]}
                if dataset.sampler.unit == "step":
                    names["anchor"] = batch["anchor"][here]
                dataset.update_priority(batch["index"][here], values[rows], **names)

    def state_dict(self) -> dict[str, Any]:
        """The position of iteration, and the states of the datasets, with their priorities."""
        return {
            **self._position.state_dict(),
            "config": self._config(),
            "sources": {name: dataset.state_dict() for name, dataset in self.sources.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`: the next iteration yields the batch after the last one delivered before it was taken.

        Raises:
            SchemaError: an invalid state, or one of a mixture with other options or datasets.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("sources"), Mapping):
            raise SchemaError(f"The state is {shown(state)}; expected a state_dict() of a Mixture.")
        if state.get("config") != self._config():
            raise SchemaError(
                f"The state belongs to a mixture with the options {state.get('config')}; these are {self._config()}. "
                "Batches would not continue; make the mixture with the saved options."
            )
        values = Position.check_state(state)
        for name, dataset in self.sources.items():
            dataset.load_state_dict(state["sources"][name])
        self._position.load_state_dict(values)

    def _config(self) -> dict[str, Any]:
        schedule = self.schedule
        return {
            "sources": list(self.sources),
            "fixed": self._fixed,
            "batch_size": self.batch_size,
            "batches_per_epoch": self.batches_per_epoch,
            "shares": self.shares,
            "schedule": None
            if schedule is None
            else getattr(schedule, "__qualname__", type(schedule).__qualname__),
            "seed": self.seed,
        }

    def __repr__(self) -> str:
        if not hasattr(self, "_counted"):
            return "<Mixture, not opened>"
        shares = ", ".join(
            f"{name}: {share:g}" for name, share in zip(self.sources, self._fixed, strict=True)
        )
        when = "" if self.schedule is None else " at first, then by a schedule"
        return f"<Mixture of {self.batch_size:,} rows, {self.shares} shares {shares}{when}>"


def _checked_sources(sources: Any) -> dict[str, ReplayDataset]:
    """Name -> dataset, of valid sources."""
    fits = isinstance(sources, Mapping) and len(sources) > 0
    fits = fits and all(
        isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], ReplayDataset)
        for each in sources.values()
    )
    if not fits:
        raise SchemaError(
            f"sources is {shown(sources)}; expected a mapping of name to (ReplayDataset, share)."
        )
    datasets = {str(name): dataset for name, (dataset, _) in sources.items()}
    first_name, first = next(iter(datasets.items()))
    for name, dataset in datasets.items():
        if dataset.batch_size == 0 or dataset.shards is not None or dataset.output != "dict":
            raise SchemaError(
                f"Source {name!r} has batch_size=Steps(...), Shards or an output other than 'dict'; expected a "
                "ReplayDataset of a Table with a batch_size in rows that yields dicts."
            )
        schema, windows = dataset.table.schema, dataset.windows
        apart = {**ragged_of(schema, windows), **timed_of(windows), **next_of(schema, windows)}
        if apart:
            raise SchemaError(
                f"Source {name!r} has the windows {list(apart)} of ragged columns, with timestamps, or of an NStep "
                "with windows in next; expected none in a Mixture, whose sources share one batch."
            )
        padded = dataset.layout == "padded" and has_whole(dataset.windows)
        if dataset.layout in ("jagged", "tree") or padded or dataset.groups is not None:
            raise SchemaError(
                f"Source {name!r} has layout={dataset.layout!r}, groups, or whole trajectories that are padded; "
                "expected layout='padded' or 'packed' and single rows."
            )
        for what in ("layout", "device", "windows"):
            mine, other = getattr(dataset, what), getattr(first, what)
            if mine != other:
                raise SchemaError(
                    f"Sources {first_name!r} and {name!r} have {what} {other!r} and {mine!r}; expected the same."
                )
        if dataset.mask_names != first.mask_names:
            raise SchemaError(
                f"Of the sources {first_name!r} and {name!r} one has a mapping as windows, and one a Window for all "
                "columns, so that their masks differ; give both the same."
            )
        for window, (one, other) in _dtypes(first, dataset).items():
            if one != other:
                raise SchemaError(
                    f"Sources {first_name!r} and {name!r} have column {window!r} of {one} and {other}; expected "
                    "the same."
                )
    if len({id(dataset) for dataset in datasets.values()}) != len(datasets):
        raise SchemaError("A dataset is two sources; expected distinct ones.")
    return datasets


def _dtypes(one: ReplayDataset, other: ReplayDataset) -> dict[str, tuple[Any, Any]]:
    """Dtype and shape of the column of each window in two datasets."""
    found = {}
    for name, window in one.windows.items():
        column = getattr(window, "column", None) or name
        each = [dataset.table.schema.get(column) for dataset in (one, other)]
        found[name] = tuple(None if part is None else (part.dtype, part.shape) for part in each)
    return found  # type: ignore[return-value]


def _normalized(shares: Any, names: list[str]) -> list[float]:
    """Shares in the order of `names`, with the sum 1."""
    if not isinstance(shares, Mapping) or set(shares) != set(names):
        raise SchemaError(f"The shares are {shown(shares)}; expected a number for each of {names}.")
    for name in names:
        share = shares[name]
        fits = isinstance(share, (int, float, np.integer, np.floating)) and not isinstance(share, bool)
        if not fits or not math.isfinite(share) or share < 0:
            raise SchemaError(
                f"The share of {name!r} is {shown(share)}; expected a finite number of at least 0."
            )
    values = np.array([float(shares[name]) for name in names])
    if values.sum() <= 0:
        raise SchemaError(f"The shares are {dict(shares)}; expected at least one above 0.")
    normalized: list[float] = (values / values.sum()).tolist()
    return normalized


def _rounded(wanted: list[float], total: int) -> list[int]:
    """Integers with the sum `total`, from numbers whose sum is about that, by largest remainders; ties by order."""
    factor = total / (
        sum(wanted) if len(wanted) < 8 else float(np.sum(wanted))
    )  # as numpy adds up to 7 of them
    scaled = [each * factor for each in wanted]
    # A share such as 1/3 is not exact: what is a whole number but for that stays one.
    rows = [math.floor(each + 1e-9) for each in scaled]
    order = sorted(range(len(rows)), key=lambda i: rows[i] - scaled[i])
    for i in order[: total - sum(rows)]:
        rows[i] += 1
    return rows


def _drawn(dataset: ReplayDataset, count: int) -> Batch:
    """A batch of `count` rows; a pass over all items may end inside."""
    parts: list[Batch] = []
    have = 0
    while have < count:
        batch = dataset.sample(count - have)
        have += len(batch["index"])
        parts.append(batch)
    return joined(parts) if len(parts) > 1 else parts[0]


def joined(parts: Sequence[Mapping[str, Any]], steps: Collection[str] | None = None) -> Batch:
    """The rows of several batches, one after another, in new memory; padded ones, packed ones, or trees.

    Args:
        steps: names of the columns of steps of trees, whose shared segments come after all rows; None of others.
    """
    keys = dict.fromkeys(key for part in parts for key in part)
    batch = Batch()
    of_tree = () if steps is None else ("parent", "group", "cu_seqlens", "position", *steps)
    for key in keys:
        if key in of_tree:
            continue
        if key == "max_seqlen":
            batch[key] = max(part[key] for part in parts)
        elif key == "cu_seqlens":
            sizes = torch.cat([part[key].diff() for part in parts])
            batch[key] = torch.cat((sizes.new_zeros(1), sizes.cumsum(0, dtype=sizes.dtype)))
        elif key == "priority_weight":
            batch[key] = torch.cat(
                [
                    part[key] if key in part else torch.ones_like(part["index"], dtype=torch.float32)
                    for part in parts
                ]
            )
        else:
            values = [part[key] for part in parts]
            batch[key] = _joined_values(values)
    if steps is not None:
        batch.update(_joined_trees(parts, ("position", *steps)))
    return batch


def _joined_trees(parts: Sequence[Mapping[str, Any]], steps: Iterable[str]) -> dict[str, Any]:
    """What a tree of several has of its segments: first the rows of all, then the shared ones of all."""
    counts = [len(part["index"]) for part in parts]
    shared = [len(part["cu_seqlens"]) - 1 - count for part, count in zip(parts, counts, strict=True)]
    found: dict[str, Any] = {}
    before, groups, parents, numbers = sum(counts), 0, list[torch.Tensor](), list[torch.Tensor]()
    for part, count, more in zip(parts, counts, shared, strict=True):
        parent, group = part["parent"], part["group"]
        parents.append(torch.where(parent >= 0, parent - count + before, parent))
        numbers.append(group + groups)
        before, groups = before + more, groups + int(group.max()) + 1
    found["parent"], found["group"] = torch.cat(parents), torch.cat(numbers)
    lengths = [part["cu_seqlens"].diff() for part in parts]
    heads = [length[:count] for length, count in zip(lengths, counts, strict=True)]
    sizes = torch.cat(heads + [length[count:] for length, count in zip(lengths, counts, strict=True)])
    found["cu_seqlens"] = torch.cat((sizes.new_zeros(1), sizes.cumsum(0, dtype=sizes.dtype)))
    ends = [int(part["cu_seqlens"][count]) for part, count in zip(parts, counts, strict=True)]
    for name in steps:
        values = [part[name] for part in parts]
        parted = [_some(value, 0, end) for value, end in zip(values, ends, strict=True)]
        parted += [_some(value, end, len(value)) for value, end in zip(values, ends, strict=True)]
        found[name] = _joined_values(parted)
    return found


def _some(values: Any, begin: int, end: int) -> Any:
    """Values of some steps, of columns of any kind."""
    if not isinstance(values, Ragged):
        return values[begin:end]
    offsets = values.offsets[begin : end + 1]
    rows = values.values[int(offsets[0]) : int(offsets[-1])]
    return Ragged._of(rows, offsets - offsets[0], (end - begin,))


def _joined_ragged(values: Sequence[Ragged]) -> Ragged:
    sizes = torch.cat([each.offsets.diff() for each in values])
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    count = sum(each.shape[0] for each in values)
    return Ragged._of(torch.cat([each.values for each in values]), offsets, (count, *values[0].shape[1:]))


def _joined_values(values: list[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return dict(joined(values))
    if isinstance(values[0], list):
        return list(itertools.chain(*values))
    if isinstance(values[0], Ragged):
        return _joined_ragged(values)
    if isinstance(values[0], tuple):
        return tuple(_joined_values(list(parts)) for parts in zip(*values, strict=True))
    return torch.cat(values)

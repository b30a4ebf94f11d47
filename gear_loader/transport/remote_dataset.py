"""`ReplayDataset` over a table of a server: the server draws and gathers, and its batches come as a stream."""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch

from gear_loader.collection.batches import Batch
from gear_loader.dataset import ReplayDataset
from gear_loader.dataset.options import Ranks
from gear_loader.dataset.origin import Origin
from gear_loader.errors import SchemaError, TransportError
from gear_loader.selection.samplers import SAMPLE_EPOCH
from gear_loader.selection.weights import checked_leaves
from gear_loader.storage.priority_updates import is_strict, request
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.schema import as_mapping
from gear_loader.transport.learner_link import LearnerLink
from gear_loader.transport.learner_options import options_to_json
from gear_loader.utils.arrays import Array
from gear_loader.utils.captures import refuse_capture
from gear_loader.utils.checks import at_least


class RemoteOrigin(Origin):
    """What a dataset over a table of a server draws from."""

    def check(self, **_: Any) -> None:
        """The server checks, when it makes its dataset."""

    def open(self, dataset: Any, options: Mapping[str, Any]) -> None:
        dataset.learn()

    def check_worker(self, *_: Any, **__: Any) -> None:
        raise SchemaError(
            "A DataLoader worker cannot draw from a server. Use num_workers=0: the server prepares batches ahead."
        )

    def set(self, rows: Mapping[str, Any], mask: Any, columns: Mapping[str, Any], *, strict: bool) -> int:
        names = rows["index"], rows["anchor"]
        stale: Literal["ignore", "error"] = "error" if strict else "ignore"
        table: Any = self.table
        count: int = table.set(*names, generation=rows["generation"], mask=mask, stale=stale, **columns)
        return count


class RemoteDataset(ReplayDataset):
    """A `ReplayDataset` whose draws a server makes; made by ``ReplayDataset(gear_loader.connect(url), ...)``.

    The same options draw the same batches as over the `Table`. Transforms and `output` are applied here. The server
    draws `prefetch` batches ahead, up to `Prefetch.max_bytes`, holds them until they have arrived, and makes them with
    its own processors. For a learner of its own machine and user it gathers large tensors into memory that the learner
    maps, and uses it again when the learner has no reference left: a child that the learner forks has to copy a batch
    that it inherits.
    """

    def learn(self) -> None:
        """Let the server make its dataset."""
        given, table, (rank, world) = self._given, self.table, self._origin.rank()
        names = ("batch_size", "windows", "columns", "sampler", "groups", "draws", "batches_per_epoch")
        sent = {name: given[name] for name in names}
        sent |= {"seed": self.seed, "ranks": Ranks(rank=rank, world_size=world)}
        sent["layout"] = "packed" if self._packs and self.layout != "tree" else self.layout
        sent["keep"] = self.prefetch + self.keep + 2
        remote: Any = table
        self._link = LearnerLink(
            remote.peer,
            remote.name,
            options_to_json(sent),
            remote.timeout,
            ahead=self.prefetch > 0,
            pinned=self.device.type == "cuda",
            maps=self.device.type != "cuda",
        )
        self._closing = weakref.finalize(self, self._link.close)
        self._turn_number = 0  # of the running iteration

    def _options(self) -> dict[str, Any]:
        return {}  # no other rank compares them

    # ---------------------------------------------------------------- batches

    def _iterate(self, number: int, workers: int, *, in_worker: bool) -> Generator[Batch]:
        refuse_capture(self.device, "a batch")
        position, link = self._position, self._link
        epoch, before, step = position.begin(lambda call: call())
        turn = self._turn_number = self._turn_number + 1
        past, ordered = position.past, step
        given = {"epoch": epoch, "step": step, "past": past}
        link.submit("iterate", given, place=(epoch, step, past), wanted=False)
        asked: collections.deque[int] = collections.deque()
        try:
            while True:
                if turn != self._turn_number:
                    raise SchemaError(
                        "An iteration went on after a later one of the same dataset had begun; expected one at a "
                        "time. Make two datasets."
                    )
                refuse_capture(self.device, "a batch")
                while len(asked) <= self._batches_ahead(max(self._told_bytes, link.largest)):
                    ordered += 1
                    asked.append(link.submit("next", {}, place=(epoch, ordered, past)))
                received = link.result(asked.popleft())
                if received is None:
                    position.end(epoch)
                    return
                step += 1
                position.delivered(epoch, before, step)
                yield self._shown(self._delivered(received), epoch, step - 1, self)  # type: ignore[arg-type]
        finally:
            link.drop(asked)

    def _batches_ahead(self, size: int) -> int:
        """How many batches of so many bytes to ask for ahead."""
        return min(self.prefetch, self._max_ahead // max(size, 1))

    @property
    def _told_bytes(self) -> int:
        """Bytes of a batch, of which the server knows about how many there will be."""
        return int(self._link.described["bytes"])

    def sample(self, batch_size: int | None = None) -> Batch:
        """See `ReplayDataset.sample`: the server draws one batch, after those that it is drawing ahead."""
        with self._buffers.turn:
            refuse_capture(self.device, "a batch")
            size = None if batch_size is None else at_least("batch_size", batch_size)
            position, stream = self._position, (self._sample_epoch - SAMPLE_EPOCH) >> 32
            number, items = position.samples, position.sampled_items
            given = {"batch_size": size, "number": number, "items": items, "stream": stream}
            received = self._link.call("sample", given)
            position.sampled(received["items"])
            epoch = self._sample_epoch
            if self.sampler.passes and self._budget is None:
                epoch += 1 + self._rank()[0]
            shown: Batch = self._shown(self._delivered(received["batch"]), epoch, number, self)  # type: ignore[arg-type]
            return shown

    def names(self, batch: Batch) -> tuple[Array, ...]:
        """Indices, anchors and generations of a batch, int64 [B] each, on the host; waits for the GPU."""
        return tuple(batch[key].cpu().numpy() for key in ("index", "anchor", "generation"))

    def _delivered(self, batch: Batch) -> Batch:
        """A batch on the dataset's device."""
        if self.device.type != "cuda":
            return batch
        found: Batch = moved(batch, self.device)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        self._link.memory.copied(copied)
        return found

    def __len__(self) -> int:
        """See `ReplayDataset.__len__`."""
        if self.batches_per_epoch is None and self._budget is None:
            if error := self.prepared_error():
                raise SchemaError(error)
            return int(self._link.call("attribute", {"name": "length"}))
        if self.batches_per_epoch is None or self.batches_per_epoch == math.inf:
            raise TypeError("This ReplayDataset has no length: it is endless, or depends on what is drawn.")
        return int(self.batches_per_epoch)

    def filler(self, prefetcher: Any) -> NoReturn:
        raise SchemaError(
            "A Mixture was given a dataset over a server; expected datasets of tables of this machine."
        )

    def sample_by(self, fill: Any, buffers: Any, size: int) -> NoReturn:
        self.filler(None)

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
        """See `ReplayDataset.update_priority`: sent to the server, between the same draws as without one.

        Priorities of trajectories are the table's, for all learners; the server needs ``allow="all"``. With
        ``stale="ignore"`` it does not wait for the server, whose error a later call raises.
        """
        self._by_priority("update_priority")
        strict = is_strict(stale)
        index = as_mapping(index)
        if isinstance(index, Mapping):
            index, generation, anchor, shard = self._names(Batch(index), generation, anchor, shard)
        if shard is not None:
            raise SchemaError(
                "shard was received, but this dataset draws from one table; leave it out. Nothing was changed."
            )
        unit = self.sampler.unit
        new = request(index, priority, generation=generation, anchor=anchor, unit=unit)
        checked_leaves(self.sampler, new.priorities)
        values = {"index": new.slots, "priority": new.priorities, "generation": new.generations}
        if unit == "step":
            values["anchor"] = new.steps
        number = self._link.submit("update", {"stale": stale}, values, wanted=strict)
        if strict:
            self._link.result(number)

    def priority_quantiles(self, shares: Sequence[float]) -> list[float]:
        """See `ReplayDataset.priority_quantiles`."""
        self._by_priority("priority_quantiles")
        given = {"name": "quantiles", "shares": [float(each) for each in shares]}
        return list(self._link.call("attribute", given))

    @property
    def num_stale(self) -> int:
        """Number of stale rows that updates of this learner have skipped so far."""
        self._by_priority("num_stale")
        return int(self._link.call("attribute", {"name": "num_stale"}))

    def mass(self) -> tuple[float, float]:
        """See `ReplayDataset.mass`."""
        mass, least = self._link.call("attribute", {"name": "mass"})
        return float(mass), float(least)

    def stats(self) -> dict[str, float]:
        """See `ReplayDataset.stats`."""
        return dict(self._link.call("attribute", {"name": "stats"}))

    def _selected(self) -> NoReturn:
        raise TransportError("Draws of this dataset are made by its server.")

    def _by_priority(self, method: str) -> Any:
        if not self.sampler.by_priority:
            raise SchemaError(
                f"{method} was called, but {self.sampler!r} does not draw by priority; use gear_loader.Prioritized "
                "or gear_loader.TopK."
            )

    # ---------------------------------------------------------------- state

    def _config(self) -> dict[str, Any]:
        found: dict[str, Any] = self._link.described["config"]
        return found

    def _selection_state(self, *, full: bool = True) -> dict[str, Any]:
        if self._budget is None and not self.sampler.by_priority:
            return {}
        state: dict[str, Any] = _plain(self._link.call("state", {}))
        return state

    def _load_selection(self, state: Mapping[str, Any]) -> None:
        given = {name: state[name] for name in ("budget", "priorities") if name in state}
        if self._budget is not None or self.sampler.by_priority:
            self._link.call("load", {}, given)

    def settle(self) -> None:
        """Wait until the server has executed all requests, such as priority updates."""
        self._link.call("attribute", {"name": "stats"})

    def close(self) -> None:
        """End the running iteration and the connection. Idempotent."""
        self._turn_number += 1
        self._closing()

    def __getstate__(self) -> NoReturn:
        raise SchemaError(
            "A dataset over a server cannot be sent to another process: make one there, of its own connection."
        )

    def _after_fork(self) -> None:
        pass  # its link raises an error in the child


def moved(value: Any, device: torch.device) -> Any:
    """A tree on a device, by copies on the current stream."""
    if isinstance(value, dict):
        each_moved = {key: moved(each, device) for key, each in value.items()}
        return Batch(each_moved) if isinstance(value, Batch) else each_moved
    if isinstance(value, (torch.Tensor, Ragged)):
        return value.to(device, non_blocking=True)
    return value


def _plain(value: Any) -> Any:
    """A tree as plain dicts and lists, in memory of its own."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value

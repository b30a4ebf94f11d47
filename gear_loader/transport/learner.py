"""What a server does for a learner on another machine: a dataset over its table, and calls that run once, in order."""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gear_loader.collection.windows import has_whole, reads, windows_of
from gear_loader.dataset import ReplayDataset
from gear_loader.dataset.options import Prefetch, Ranks
from gear_loader.dataset.origin import Origin
from gear_loader.errors import GearError, RateLimitError, SchemaError, TableEmptyError, TransportError
from gear_loader.selection.base import Selection
from gear_loader.selection.step_budget import Steps
from gear_loader.storage.table import Table
from gear_loader.transport.access import refusal
from gear_loader.transport.learner_options import options_from_json
from gear_loader.transport.mapped_batches import MappedMemory
from gear_loader.transport.message_schema import kind_of, shown
from gear_loader.transport.trees import TreeWriter, read_tree
from gear_loader.transport.wire import Kind, ProtocolError, pack_error
from gear_loader.utils.arrays import Array
from gear_loader.utils.checks import at_least
from gear_loader.utils.waiting import Backoff, Interrupted, interruptible, limited

_MOST_KEEP = 1024  # batches that a dataset of a learner keeps
_MOST_EPOCHS = 64  # that learners divide
_LEAST = 0.01  # seconds of an attempt to draw
_PAUSE = 0.02  # most seconds between two attempts


class LearnerCall(NamedTuple):
    """A call of a learner: its number, from 1 on; whether it maps files; what it calls, and with what."""

    number: int
    maps: bool
    name: str
    options: dict[str, Any]
    values: Any


class LearnerAnswer(NamedTuple):
    """An answer: the number of its call, its kind, its small part, and its bulk part in pieces.

    mapped: bytes of the tensors that the learner maps.
    """

    number: int
    kind: Kind
    small: bytes
    parts: list[Any]
    size: int
    mapped: int = 0


class _Served:
    """A table of a learner.

    Attributes:
        epochs: of the streams that learners divide. key: of this learner's, or "". epoch: that it is about to begin.
        shares: whether updates of priorities go to the table.
    """

    def __init__(self, table: Table, epochs: SharedEpochs, *, shares: bool, key: str) -> None:
        self._table, self.epochs, self.shares, self.key = table, epochs, shares, key
        self.epoch = 0

    def origin(self, ranks: Ranks) -> Origin:
        return _ServedOrigin(self._table, ranks, self)


class SharedEpochs:
    """What epochs of a stream that several learners divide are drawn from: the same for all of them. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._looks: collections.OrderedDict[tuple[str, int], tuple[Any, float]] = collections.OrderedDict()

    def look(self, key: str, epoch: int, look: Callable[[], tuple[Any, float]]) -> tuple[Any, float]:
        """What the first learner of an epoch has seen by `look`."""
        with self._guard:
            if (key, epoch) in self._looks:
                return self._looks[key, epoch]
        found = look()  # may wait for items
        with self._guard:
            found = self._looks.setdefault((key, epoch), found)
            while len(self._looks) > _MOST_EPOCHS:
                self._looks.popitem(last=False)
            return found


class _ServedOrigin(Origin):
    """What a learner draws from: the table, whose priorities it shares, and epochs that others may share."""

    def __init__(self, table: Table, ranks: Ranks, served: _Served) -> None:
        super().__init__(table, ranks)
        self._served = served

    @property
    def is_shared(self) -> bool:
        return self._served.shares

    def begin_epoch(
        self, selection: Selection, look: Callable[[], tuple[Any, float]], *, fresh: bool
    ) -> tuple[Any, float]:
        served = self._served
        return look() if not served.key else served.epochs.look(served.key, served.epoch, look)


class Learner:
    """Executes the calls of one learner, and keeps the answers until they have arrived.

    Args:
        table: to draw from. epochs: of the server.
        options: of its dataset, as JSON; None for a learner that chooses rows itself.
        allow: as for `Server`. most_bytes: of what is kept for it. wait: seconds that a draw waits for trajectories.
        files: memory of batches that it may map, or None.

    Attributes:
        executed: number of the last executed call.
        owner: the connection that it belongs to; None while its learner is away.
        left_at: `time.monotonic` since then.

    Raises:
        SchemaError: options that are invalid for the table. TransportError: invalid options.
    """

    def __init__(
        self,
        table: Table,
        options: Any,
        epochs: SharedEpochs,
        *,
        allow: str,
        most_bytes: int,
        wait: float,
        files: MappedMemory | None = None,
    ) -> None:
        self._table, self._epochs = table, epochs
        self._allow = allow
        self._most_bytes = most_bytes
        self._wait = wait
        self._dataset: ReplayDataset | None = None
        self._batches: Iterator[Any] | None = None
        self._at: tuple[int, int, int] | None = (
            None  # epoch, step and batches of iterations before, of the next batch
        )
        self._answers: collections.deque[LearnerAnswer] = collections.deque()
        self._files = files
        # What the learner maps, by the number of its answer, and its bytes: the memory of batches is not used again.
        self._lent: dict[int, tuple[Any, int]] = {}
        self.executed = 0
        self.owner: object | None = None
        self.left_at = time.monotonic()
        self._turn = threading.Lock()
        self._trees = TreeWriter()
        if not isinstance(options, dict) or not {"dataset", "at"}.issuperset(options):
            raise TransportError(
                f"The options of a learner are {kind_of(options)}; expected a dataset's and its place."
            )
        if options.get("dataset") is not None:
            self._dataset = self._made(options_from_json(options["dataset"]))
            self._at = _place(options.get("at"))
            if (
                self._at is not None and self._dataset.batch_size == 0
            ):  # of `Steps`: each depends on those before
                epoch, skipped, past = self._at
                self._start(epoch, 0, past)
                for _ in range(skipped):
                    self._next({}, None)

    def _made(self, options: dict[str, Any]) -> ReplayDataset:
        keep = options.pop("keep", 2)
        if at_least("keep", keep) > _MOST_KEEP:
            raise SchemaError(f"{keep:,} batches are to be kept; expected at most {_MOST_KEEP:,}.")
        sampler = options.get("sampler")
        shares = sampler is not None and sampler.by_priority and sampler.unit == "trajectory"
        ranks = options.get("ranks") or Ranks()
        passes = sampler is not None and sampler.passes and (ranks.world_size or 1) > 1
        named = {**options, "ranks": ranks.world_size}
        key = f"{self._table.name}: {sorted(named.items(), key=str)}" if passes else ""
        source: Any = _Served(self._table, self._epochs, shares=shares, key=key)
        self._served = source
        missing = {"batch_size", "windows"} - set(options)
        if missing:
            raise TransportError(f"The options of a dataset lack {sorted(missing)}.")
        dataset = ReplayDataset(source, device="cpu", prefetch=Prefetch(0, keep=keep), **options)
        self._size = self._check_size(dataset, options["batch_size"])
        dataset._selected()  # which remembers as many draws
        dataset.keep = 1  # answers that have not arrived refer to their memory
        dataset._memory = self._files or False
        return dataset

    def _check_size(self, dataset: ReplayDataset, batch_size: Any) -> int:
        """About how many bytes a batch takes; refuse those that would take more than one learner may have."""
        if isinstance(batch_size, Steps):
            return self._checked_bytes(dataset.windows, dataset.batch_size, batch_size.max_steps)
        average = -(-self._table.num_steps // max(1, len(self._table)))
        # Of whole trajectories about as many steps as there are on average.
        return self._checked_bytes(dataset.windows, batch_size, batch_size * average)

    def _checked_bytes(self, windows: Any, rows: int, steps: int) -> int:
        """Bytes of so many rows, of whole trajectories with so many steps; SchemaError if they are too many."""
        schema, size = self._table.schema, 0
        for source, window in reads(schema, windows):
            column = schema[source]
            count = rows if column.trajectory else steps if has_whole(windows) else rows * window.length
            size += count * column.step_bytes
        if size > self._most_bytes:
            raise SchemaError(
                f"About {size:,} bytes were asked for; this server sends at most {self._most_bytes:,} at a "
                "time. Ask for fewer rows."
            )
        return size

    def described(self) -> dict[str, Any]:
        """What the learner is told of its dataset."""
        return {} if self._dataset is None else {"config": self._dataset._config(), "bytes": self._size}

    # ---------------------------------------------------------------- calls

    def begin(self, first: int) -> None:
        """Begin with this call, of a learner that an earlier server has served."""
        self.executed = first - 1

    @staticmethod
    def read(number: int, maps: bool, text: bytes, data: Array) -> LearnerCall:
        """The call of a message from an untrusted source.

        Raises:
            ProtocolError: invalid.
        """
        try:
            name, options, tree = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(
                f"A call of a learner is no JSON of a name, options and a tree ({error})."
            ) from None
        if not isinstance(name, str) or not isinstance(options, dict):
            raise ProtocolError(
                f"A call of a learner is {shown(str(text[:100]))}; expected a name, options and a tree."
            )
        return LearnerCall(number, maps, name, options, read_tree(tree, data))

    def execute(
        self, owner: object, call: LearnerCall, is_gone: Callable[[], bool] = bool
    ) -> LearnerAnswer | None:
        """Execute a call, or find the answer of one that was executed; None if another connection took the learner, or
        `is_gone()` says that its own one has ended.

        Raises:
            ProtocolError: calls are missing between this one and the one before.
        """
        with self._turn:
            if self.owner is not owner:
                return None
            if call.number <= self.executed:
                found = next((each for each in self._answers if each.number == call.number), None)
                if found is None:
                    raise ProtocolError(f"Call {call.number:,} came again, whose answer had arrived.")
                return found
            if call.number != self.executed + 1:
                raise ProtocolError(f"Call {call.number:,} came after call {self.executed:,}.")
            answer = self._answered(call, is_gone)
            if answer is not None:
                self.executed = call.number
                self._answers.append(answer)
            return answer

    def forget(self, received: int, ended: Sequence[int] = ()) -> None:
        """Forget the answers that have arrived, and what they lent if the learner has `ended` with it."""
        with self._turn:
            while self._answers and self._answers[0].number <= received:
                self._answers.popleft()
            for number in ended:
                self._lent.pop(number, None)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the answers that have not arrived, and of what the learner maps."""
        return sum(each.size for each in self._answers) + sum(size for _, size in self._lent.values())

    @property
    def is_full(self) -> bool:
        """Whether the learner has to receive an answer before there is memory for another one."""
        largest = max((each.size + each.mapped for each in self._answers), default=0)
        return bool(self._answers) and self.kept_bytes + largest > self._most_bytes

    def _answered(self, call: LearnerCall, is_gone: Callable[[], bool]) -> LearnerAnswer | None:
        owner = self.owner
        work: Callable[..., Any] | None = _CALLS.get(call.name)
        try:
            if work is None:
                raise TransportError(
                    f"A server was asked for {shown(call.name)}; expected one of {sorted(_CALLS)}."
                )
            # At most half of the memory: what a learner keeps must not end its draws.
            lends = call.maps and sum(size for _, size in self._lent.values()) < self._most_bytes // 2
            with interruptible(lambda: self.owner is not owner or is_gone()):
                found = work(self, call.options, call.values)
            tree = self._trees.pack(found, self._files if lends else None)
            if tree.size > self._most_bytes:
                raise TransportError(
                    f"An answer of {tree.size:,} bytes was asked for; this server sends at most "
                    f"{self._most_bytes:,} at a time. Ask for fewer rows."
                )
        except Interrupted:  # the connection is lost: another one asks again
            self._batches = None
            return None
        except GearError as error:
            return LearnerAnswer(call.number, Kind.ERROR, pack_error(error), [], 0)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            wrong = TransportError(f"A call {shown(call.name)} is invalid ({type(error).__name__}: {error}).")
            return LearnerAnswer(call.number, Kind.ERROR, pack_error(wrong), [], 0)
        if tree.mapped:
            self._lent[call.number] = found, tree.mapped
        return LearnerAnswer(call.number, Kind.ANSWER, tree.text, tree.parts, tree.size, tree.mapped)

    def _own(self) -> ReplayDataset:
        if self._dataset is None:
            raise TransportError("A learner without a dataset asked for a batch.")
        return self._dataset

    # ---------------------------------------------------------------- batches

    def _iterate(self, given: Mapping[str, Any], _: Any) -> None:
        """Begin an iteration at a batch of an epoch."""
        epoch, step, past = (at_least(name, given[name], least=0) for name in ("epoch", "step", "past"))
        self._start(epoch, step, past)

    def _start(self, epoch: int, step: int, past: int) -> None:
        dataset = self._own()
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]
            self._batches = None
        position = {"epoch": epoch, "before": 0, "step": step, "past": past}
        dataset._position.load_state_dict({**dataset._position.state_dict(), **position})
        self._at = epoch, step, past
        self._served.epoch = epoch
        self._batches = iter(dataset)

    def _next(self, _: Mapping[str, Any], __: Any) -> Any:
        """The next batch; None at the end of the epoch."""
        if self._at is None:
            raise TransportError("A learner asked for a batch before it began an iteration.")
        epoch, step, past = at = self._at

        def advance() -> Any:
            if self._batches is None:
                self._start(*at)
            assert self._batches is not None
            try:
                return next(self._batches, None)
            except (RateLimitError, TableEmptyError):  # which has ended the iteration
                self._batches = None
                raise

        batch = self._waited(advance)
        self._at = epoch, step + 1, past
        return batch

    def _waited(self, draw: Callable[[], Any]) -> Any:
        """What `draw()` returns once there are trajectories to draw from; its error if there are none in time."""
        waiting = Backoff(self._wait, longest=_PAUSE)
        while True:
            try:
                with limited(max(_LEAST, waiting.left)):
                    return draw()
            except (RateLimitError, TableEmptyError):
                if not waiting.sleep():
                    raise

    def _sample(self, given: Mapping[str, Any], _: Any) -> Any:
        """A batch of `ReplayDataset.sample`, and the number of drawn items."""
        dataset = self._own()
        size = None if given["batch_size"] is None else at_least("batch_size", given["batch_size"])
        if size is not None:
            self._check_size(dataset, size)
        items = at_least("items", given["items"], least=0)
        dataset.seek_sample(at_least("number", given["number"], least=0), items, stream=given["stream"])
        batch = self._waited(lambda: dataset.sample(size))
        return {"batch": batch, "items": dataset._position.sampled_items - items}

    # ---------------------------------------------------------------- priorities and states

    def _update(self, given: Mapping[str, Any], values: Any) -> None:
        dataset = self._own()
        if dataset.sampler.unit == "trajectory" and (why := refusal(self._allow, Kind.UPDATE)):
            raise TransportError(why)
        rows = {name: values.get(name) for name in ("generation", "anchor")}
        dataset.update_priority(values["index"], values["priority"], **rows, stale=given["stale"])

    def _state(self, given: Mapping[str, Any], _: Any) -> Any:
        return self._own()._selection_state()

    def _load(self, _: Mapping[str, Any], values: Any) -> None:
        self._batches = self._at = None
        self._own()._load_selection(values)

    def _attribute(self, given: Mapping[str, Any], _: Any) -> Any:
        dataset, name = self._own(), given["name"]
        if name == "length":
            return len(dataset)
        if name == "stats":
            return dataset.stats()
        if name == "mass":
            return dataset.mass()
        if name == "quantiles":
            return dataset.priority_quantiles(given["shares"])
        if name == "num_stale":
            return dataset.num_stale
        raise TransportError(f"A server was asked for {shown(name)} of a dataset, which it does not tell.")

    # ---------------------------------------------------------------- rows that the learner chooses

    def _item(self, given: Mapping[str, Any], _: Any) -> Any:
        return self._table[at_least("index", given["index"], least=0)]

    def _final(self, given: Mapping[str, Any], _: Any) -> Any:
        return self._table.final(at_least("index", given["index"], least=0))

    def _gather(self, given: Mapping[str, Any], values: Any) -> Any:
        windows = options_from_json({"windows": given["windows"]})["windows"]
        slots = np.asarray(values["index"])
        if slots.ndim == 1 and slots.dtype.kind in "iu":  # else `gather` says what is wrong
            lengths = self._table._engine.reader().index_arrays()[0][:, 0]
            steps = int(lengths.take(slots, mode="clip").sum())
            self._checked_bytes(windows_of(self._table.schema, windows, None), len(slots), steps)
        return self._table.gather(values["index"], values.get("anchor"), windows=windows)

    def _rows(self, _: Mapping[str, Any], __: Any) -> Any:
        return {"indices": self._table.indices(), "lengths": self._table.lengths()}

    def close(self) -> None:
        """End the iteration; a draw that waits ends soon."""
        self.owner = None
        with self._turn:
            if self._dataset is not None:
                self._dataset.close()
            self._answers.clear()
            self._lent.clear()
            self._batches = self._dataset = None


_CALLS: dict[str, Callable[..., Any]] = {
    "iterate": Learner._iterate,
    "next": Learner._next,
    "sample": Learner._sample,
    "update": Learner._update,
    "state": Learner._state,
    "load": Learner._load,
    "attribute": Learner._attribute,
    "item": Learner._item,
    "final": Learner._final,
    "gather": Learner._gather,
    "rows": Learner._rows,
}


def _place(at: Any) -> tuple[int, int, int] | None:
    """The place of an iteration in a message."""
    if at is None:
        return None
    if not isinstance(at, list) or len(at) != 3:
        raise TransportError(f"The place of an iteration is {kind_of(at)}; expected three numbers.")
    epoch, step, past = (at_least("the place of an iteration", each, least=0) for each in at)
    return epoch, step, past

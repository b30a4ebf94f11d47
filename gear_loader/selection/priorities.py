"""The priorities of one table's items: they follow the table, take updates, and make a state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from gear_loader.errors import GearError, LockTimeoutError, SchemaError, StaleIndexError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.native import priority_updates
from gear_loader.native.priority_updates import live_items
from gear_loader.selection.base import Anchor, SelectionContext
from gear_loader.selection.item_map import ItemMap, Leaves
from gear_loader.selection.leaf_blocks import LeafBlocks
from gear_loader.selection.leaves import Change
from gear_loader.selection.random import key
from gear_loader.selection.samplers import Draw, anchors
from gear_loader.selection.state import PriorityState
from gear_loader.selection.tree import uniforms
from gear_loader.selection.weights import LARGEST_LEAF, first_leaves, scaled
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.layout import Layout, most_blocks
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.reader import Changes
from gear_loader.storage.readers import Ticket
from gear_loader.storage.snapshot import Snapshot
from gear_loader.storage.states import READY
from gear_loader.storage.tier_counts import pack_priorities
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import holds_any, new_mutex, uninterrupted

_T = TypeVar("_T")
_ANY: Array = np.empty(0, dtype=np.int64)  # generations of rows that may have any
LEAVES, ANCHORS = 3, 4  # streams of random numbers, after those of `gear_loader.selection.samplers`
assert priority_updates.READY == READY
_MAX_SAMPLE = 1 << 18  # most leaves read for statistics
_MEANS_SECONDS = 1.0
_AMID_TIMEOUT = 2.0  # seconds that a signal handler waits for another thread's change of the priorities


class _BrokenMutex:
    """Replaces the mutex of a selection that was forked in the middle of a change; acquiring it raises GearError."""

    def __enter__(self) -> None:
        raise GearError(
            f"This process ({os.getpid()}) was forked while its parent's prefetch thread was drawing: the priorities "
            "here are incomplete. Make a new ReplayDataset in the child, close iterators before the fork, or start "
            "the child with spawn."
        )

    def __exit__(self, *_: object) -> None:
        pass


class Priorities:
    """Items of a table, and their leaves in a priority tree.

    Args:
        context: the table, and a sampler that draws by priority.
        view: returns the trajectories of the table that can be drawn, now.
        make_leaves: makes the leaves, `HostLeaves` or such in the memory of a GPU.

    Attributes:
        items: where the items' leaves are.
        leaves: the leaves.
        mutex: held by draws, updates and states; the caller of methods that say so holds it.
        shares: whether updates of trajectories go to the table, too, so that its other selections follow them.
    """

    shares = False

    def __init__(
        self,
        context: SelectionContext,
        view: Callable[[], Snapshot],
        make_leaves: Callable[[ItemMap, Change], Any],
    ) -> None:
        self.context, self._view = context, view
        layout = context.table._engine.region.layout
        steps, blocks = context.sampler.unit == "step", _leaf_blocks(layout)
        if steps and blocks * layout.block_steps >= 2**31:
            fewer = "fewer blocks" if not layout.moves else "a smaller max_steps"
            raise SchemaError(
                f"{context.sampler!r} would need {blocks * layout.block_steps:,} priorities, one for each place of a "
                f"step; expected less than 2**31. Use unit='trajectory', or a table with {fewer}."
            )
        if steps and layout.prefixes:
            raise SchemaError(
                f"{context.sampler!r} draws steps by priority, and the table has Memory(prefixes=True), with steps "
                "that belong to several trajectories; expected unit='trajectory', or a table without prefixes."
            )
        if steps and 1 < context.stride < layout.block_steps:
            raise SchemaError(
                f"{context.sampler!r} was given with Draws(stride={context.stride}) and a table of blocks of "
                f"{layout.block_steps} steps; expected a table with a block_steps of at most the stride."
            )
        self.items = ItemMap(
            steps=steps,
            num_slots=layout.max_trajectories,
            num_blocks=blocks,
            block_steps=layout.block_steps,
            tier=layout.moves,
            complete=context.complete,
        )
        self._next_means = 0.0  # time of the next `_tell_means`
        self.unset: Leaves | None = None
        """Leaves of changes applied to the map, perhaps not yet to the tree."""
        self._changes = 0  # of the map or of all leaves, by another thread: odd while one is under way
        # The next sequence number before changes that are being applied.
        self._known_before: int | None = None
        self._freshness = context.sampler.freshness
        self._freshen = self._freshened if self._freshness < 1 else None
        self._policy = context.table.policy_version  # the leaves are as of this version
        # Whether trajectories that the map knows are never drawn: it holds no steps that are no complete anchor.
        self._chooses = context.subset is not None or (context.complete is not None and not steps)
        self._chooses |= context.late != 0
        self.leaves: Any = make_leaves(self.items, self._change)
        self.mutex = new_mutex()

    def after_fork(self) -> None:
        # A held mutex belongs to a thread of the parent that was in the middle of a draw or an update.
        free = self.mutex.acquire(blocking=False)
        self.mutex = new_mutex() if free else _BrokenMutex()

    # ---------------------------------------------------------------- following the table

    def follow(self, ticket: Ticket, samples: int = 0) -> None:
        """Apply the table's changes under a read ticket, which the caller ends, also if this fails. Needs the mutex.

        Args:
            samples: rows to be drawn, for the rate limiter.
        """
        self._set_unset()
        if self._freshness < 1:
            self._age()
        _, changes = self.context.table._engine.reader().begin_changes(self.items.position, samples, ticket)
        known = self.items.position, self.items.next_sequence
        if len(changes.slots) == 0:
            self.items.position, self.items.next_sequence = changes.position, changes.next_sequence
            return
        try:
            self._known_before = known[1]
            self._take_in(changes)
        except BaseException:
            if self.unset is None:  # else the map is complete and only the tree is behind
                self.items.position, self.items.next_sequence = known  # interrupted: apply the changes again
            raise

    def keep_up(self) -> None:
        """Apply the table's changes, if any. Needs the mutex."""
        if self.items.position != self.context.table._engine.reader().position:
            self.followed(lambda: None)

    def followed(self, act: Callable[[], _T]) -> _T:
        """Apply the table's changes under a read ticket, and call a function under it. Needs the mutex."""
        ticket = Ticket()

        def section() -> _T:
            self.follow(ticket)
            return act()

        return ticket.during(section)

    def _take_in(self, changes: Changes) -> None:
        chosen = self.context.chosen(changes.slots) if self.context.filters else changes.ready
        arrays = self.context.table._engine.reader().index_arrays()

        def follow() -> None:
            try:
                self.unset = self.items.follow(changes, chosen, *arrays)
            except IndexError as error:
                raise self.context.table._engine.reader().arrays.corrupt(str(error)) from error

        if self.items.steps:
            self._change(follow)  # a map of steps cannot resume from a partial change
        else:
            follow()
        self._set_unset()

    def _set_unset(self) -> None:
        """Set the leaves of changes applied to the map; may be repeated after an interruption."""
        if self.unset is not None:
            self.leaves.set(self.unset, self._freshen)
            self.unset = None
        self._known_before = None

    # ---------------------------------------------------------------- freshness

    def _age(self) -> None:
        """Scale all leaves to the current version of the policy."""
        policy = self.context.table.policy_version
        if policy != self._policy:
            factor = self._freshness ** (policy - self._policy)

            def scale() -> None:
                self.leaves.scale(factor)
                self._policy = policy

            self._change(scale)

    def _change(self, section: Callable[[], object]) -> None:
        """Call a function that changes the map or all leaves, completely or not at all; see `uninterrupted`."""

        def counted() -> None:
            if self._changes % 2:  # a part of such a function
                section()
                return
            self._changes += 1
            try:
                section()
            finally:
                self._changes += 1

        uninterrupted(counted)

    def _freshened(self, slots: Array, leaves: Array) -> Array:
        """Leaves (float32 [n]) of trajectories, for the versions that their policies are behind."""
        lags = np.maximum(self._policy - self.context.table._engine.index.arrays.versions(slots), 0)
        return scaled(leaves, self._freshness**lags)

    def known(self) -> Snapshot:
        """The trajectories that the map has taken in and that can be drawn."""
        view = self._view()
        return view.take(self.items.sequence_of[view.slots] == view.sequences)

    def form(self) -> None:
        """Prepare the tree for a draw; see `HostLeaves.form`."""
        self.leaves.form(self.known)

    def summary(self) -> tuple[float, float]:
        """The mass, and the smallest positive leaf where weights need it, else infinity. Needs the mutex."""
        self.keep_up()
        self.form()
        tree = self.leaves.tree
        return tree.total, tree.minimum if self.context.sampler.least_of_table else np.inf

    def anchors(self, slots: Array, draw: Draw, stream: int) -> Array:
        """Anchor steps of drawn trajectories (slots int64 [n]), int64 [n]."""
        counts, first = self.context.num_anchors(slots), self.context.first
        steps: Array = first + keyed_anchors(self.context.anchor, counts, draw, stream)
        return steps

    def rows(self, items: Array, draw: Draw, stream: int) -> tuple[Array, Array]:
        """Slots and steps of the rows of drawn items, int64 [m] each; `stream`: of the anchors' random numbers."""
        slots, steps = self.leaves.rows(items)
        return slots, steps if self.items.steps else self.anchors(slots, draw, stream)

    # ---------------------------------------------------------------- updating

    def check_live(self, request: PriorityUpdates) -> None:
        """Raise StaleIndexError if a row names a removed trajectory or a step beyond its end."""
        with self.mutex:
            self.keep_up()
            stale = np.flatnonzero(self._items_of(request) < 0)
        if len(stale):
            row = int(stale[0])
            raise StaleIndexError(
                f"{len(stale)} of {len(request.slots)} priorities are for removed trajectories; the first is "
                f"row {row}, index {request.slots[row]}. Nothing was changed; stale='ignore' skips them."
            )

    def update(self, request: PriorityUpdates, weighed: Array) -> None:
        """Set priorities (`weighed`: their leaves, float32 [n], overwritten); skip and count stale rows."""
        with self.mutex:
            self.keep_up()  # so that it can update trajectories added before this call
            items = self._items_of(request)
            position = self.items.position
            if not self.items.steps:
                position = self._tell_table(request, items >= 0)
            self.leaves.update(items, request.priorities, weighed, self._freshen)
            self.items.position = position
            if self.items.own is not None and time.monotonic() >= self._next_means:
                self._tell_means(self.items.own)

    def _tell_table(self, request: PriorityUpdates, known: Array) -> int:
        """Write the priorities of known trajectories (bool [n]) into the table; return the position to follow it from.

        That is behind these changes, if there were no others before them.
        """
        table, updates = self.context.table, request
        if not known.all():
            generations = None if request.generations is None else request.generations[known]
            updates = PriorityUpdates(
                request.slots[known], request.steps[known], generations, request.priorities[known]
            )
        if table._engine.moves:
            self._tell_tier(updates.slots, updates.priorities)
        if self.shares:
            _, (before, after) = table._engine.reader().revise(updates, strict=False, steps=False)
            return after if self.items.position == before else self.items.position
        if table.rules.on_full == "evict_lowest_priority":
            given = updates.generations
            given = np.full(len(updates.slots), -1) if given is None else given
            table._engine.reader().set_priorities(updates.slots, given, updates.priorities)
        return self.items.position

    def _tell_means(self, own: LeafBlocks) -> None:
        """Tell the table's owner the mean priority of each trajectory's steps: how often a step in memory is drawn.

        Called at most once in `_MEANS_SECONDS`, and so seldom that it takes at most a twentieth of the time.
        """
        began, (alpha, eps), slots = time.monotonic(), self.context.sampler.exponent, own.slots
        if alpha > 0:
            table = self.context.table._engine.index.arrays
            blocks, firsts = np.flatnonzero(self.items.owner >= 0), np.arange(own.num_blocks)
            with np.errstate(over="ignore"):
                masses = np.add.reduceat(
                    self.leaves.tree.leaves[: self.items.capacity], firsts * self.items.block_steps
                )
                sums = np.bincount(self.items.owner[blocks], masses[blocks], minlength=len(own.extent))
                means = (sums[slots] / own.extent[slots, 0]) ** (1 / alpha) - eps
            table.tier_priority[slots] = pack_priorities(
                table.generation[slots], np.clip(means, 0, LARGEST_LEAF)
            )
        now = time.monotonic()
        self._next_means = now + max(_MEANS_SECONDS, 20 * (now - began))

    def _tell_tier(self, slots: Array, priorities: Array) -> None:
        """Tell the table's owner priorities (float32 [n]) of trajectories."""
        arrays = self.context.table._engine.index.arrays
        arrays.tier_priority[slots] = pack_priorities(arrays.generation[slots], priorities)

    def _items_of(self, request: PriorityUpdates) -> Array:
        """Items of a request, int64 [n]; -1 for a stale row."""
        slots, reader = request.slots, self.context.table._engine.reader()
        items = self.items.items(slots, request.steps, *reader.index_arrays())
        wanted = _ANY if request.generations is None else request.generations
        live: Array = np.empty_like(slots)
        # Drawn trajectories, whose generations are known, are known to the map.
        live_items(items, slots, wanted, *reader.slot_states(), self.items.next_sequence, live)
        if self._chooses and len(known := np.flatnonzero(live >= 0)):
            live[known[~self.context.chosen(slots[known])]] = -1
        return live

    def quantiles(self, shares: Array) -> Array:
        """Quantiles (float64 [n]) of the positive priorities, or of a sample if they are many."""
        with self.mutex:
            self.keep_up()
            leaves = self.leaves.every(-(-self.items.capacity // _MAX_SAMPLE))
        leaves = leaves[leaves > 0].astype(np.float64)
        if len(leaves) == 0:
            return np.full(len(shares), np.nan)
        alpha, eps = self.context.sampler.exponent
        found: Array = np.quantile(leaves, shares)
        return found ** (1 / alpha) - eps if alpha else found

    # ---------------------------------------------------------------- state

    def state_dict(self, recent: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
        """Leaves of all trajectories with sequence numbers, counters, and the rows of the last batches.

        In a signal handler amid a call of this thread under a lock: the state before that call, perhaps with a part of
        what it sets. Trajectories that it was taking in are left out; a restored selection meets them as new ones.

        Args:
            recent: returns the last batches; see `BatchHistory.state`.

        Raises:
            LockTimeoutError: another thread was changing the priorities for over `_AMID_TIMEOUT` seconds amid a call.
        """
        if holds_any():
            return self._state_amid(recent)
        with self.mutex:
            return self.followed(lambda: self._state(self.items.next_sequence, recent))

    def _state_amid(self, recent: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
        """`state_dict` without waiting for what this thread holds: its paused call goes on when this has returned."""
        # Another thread that holds the mutex may wait for a lock of the paused call; then it changes nothing.
        free = self.mutex.acquire(timeout=_AMID_TIMEOUT / 4)
        try:
            deadline = time.monotonic() + _AMID_TIMEOUT
            while True:
                before = self._changes
                if before % 2 == 0:
                    if free:
                        self._set_unset()
                    # The map may know more than the tree, until `_follow` has ended.
                    known = self._known_before
                    state = self._state(self.items.next_sequence if known is None else known, recent)
                    if self._changes == before and (free or self.unset is None):
                        return state
                if time.monotonic() > deadline:
                    raise LockTimeoutError(
                        "The state was asked for in a signal handler, in the middle of a call, while another thread "
                        f"changes the priorities for over {_AMID_TIMEOUT:g} s. Ask again after the call has returned."
                    )
                time.sleep(1e-3)
        finally:
            if free:
                self.mutex.release()

    def _state(self, following: int, recent: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
        """`state_dict` of the trajectories with sequence numbers below `following`."""
        view = self._view()
        view = view.take(view.sequences < following)
        leaves, blocks = self.leaves_of(view), self.blocks_of(view)
        policy = {} if self._freshness == 1 else {"policy": self._policy}
        return {
            **policy,
            **({} if blocks is None else {"blocks": torch.from_numpy(blocks)}),
            "sequences": torch.from_numpy(view.sequences.copy()),
            "lengths": torch.from_numpy(view.lengths.copy()),
            "leaves": torch.from_numpy(leaves),
            "maximum": self.leaves.maximum,
            "num_stale": self.leaves.num_stale,
            "recent": recent(),
        }

    def all_items(self, slots: Array, lengths: Array) -> Array:
        """Items of trajectories of so many steps (int64 [n] each), concatenated; -1 for unknown ones."""
        return self.items.all_items(slots, lengths, *self.context.table._engine.reader().index_arrays())

    def leaves_of(self, view: Snapshot) -> Array:
        """Leaves of all items of a view's trajectories, float32, concatenated; 0 for unknown ones. Needs the mutex."""
        leaves: Array = self.leaves.read(self.all_items(view.slots, view.lengths))
        return leaves

    def num_blocks(self, lengths: Array) -> Array | None:
        """Number of blocks of leaves of trajectories of so many steps (int64 [n]); None if they are the table's."""
        return None if self.items.own is None else -(-lengths // self.items.block_steps)

    def blocks_of(self, view: Snapshot) -> Array | None:
        """Blocks of leaves of all trajectories of a view, int32, -1 for unknown ones; None if they are the table's."""
        own = self.items.own
        return None if own is None else own.blocks_of(view.slots, -(-view.lengths // self.items.block_steps))

    def load(self, state: PriorityState) -> None:
        """Set the priorities of a state for the trajectories that are still in the table. Needs the mutex."""

        def restore() -> None:
            if self.items.own is not None and state.blocks is not None:
                self._rearrange(self.items.own, state.names, state.lengths, state.blocks)
            self._restore(state)

        def load() -> None:
            if state.policy is not None:
                self._policy = state.policy  # of the leaves; the next draw scales them
            if self.items.own is None:
                restore()
            else:
                self._change(restore)  # leaves that were moved have to be set

        self.followed(load)

    def _rearrange(self, own: LeafBlocks, sequences: Array, lengths: Array, blocks: Array) -> None:
        """Give trajectories their blocks of leaves in a state, on which draws depend; the caller sets all leaves.

        Args:
            sequences, lengths: int64 [n], of the trajectories. blocks: int32, their blocks one after another.
        """
        counts = -(-lengths // self.items.block_steps)
        ends = np.cumsum(counts)
        if len(blocks) != counts.sum() or blocks.max(initial=-1) >= own.num_blocks:
            return  # of a table of other sizes
        slots = own.slots
        known = self.context.table._engine.reader().slot_states()[2][slots]
        slots, known = slots[np.argsort(known, kind="stable")], np.sort(known)
        places, both = find(sequences, known)
        if len(lengths):
            whole = np.minimum.reduceat(blocks, ends - counts) >= 0
            both &= (lengths[places] == own.extent[slots, 0]) & whole[places]
        again = places[both]
        given = blocks[ranges(ends[again] - counts[again], counts[again])]
        self.leaves.tree.leaves[:] = 0
        self.items.rearrange(slots[both], given, slots[~both])

    def _restore(self, state: PriorityState) -> None:
        sequences, lengths, leaves = state.names, state.lengths, state.leaves
        view = self.known()
        places, both = find(sequences, view.sequences)
        both &= lengths[places] == view.lengths if len(lengths) else False
        # Trajectories added since get their initial priority.
        new = self.context.table._engine.reader().arrays.priority[view.slots[~both]]
        maximum = max(state.maximum, float(new.max(initial=0)))
        first = first_leaves(self.context.sampler, np.where(new == UNSET, np.float32(maximum), new))
        steps = self.items.steps
        if self._freshen is not None:
            first = self._freshen(view.slots[~both], first)
        items = self.all_items(view.slots, view.lengths)
        if both.all() and len(view) == len(lengths):
            values = leaves  # both in the order of sequence numbers
        else:
            old, counts = places[both], lengths if steps else np.ones_like(lengths)
            parts = view.lengths if steps else np.ones_like(view.lengths)
            values = np.empty(len(items), dtype=np.float32)
            known = np.repeat(both, parts)
            values[known] = leaves[ranges((np.cumsum(counts) - counts)[old], counts[old])]
            values[~known] = np.repeat(first, parts[~both])
        there = items >= 0
        self.leaves.write(*((items, values) if there.all() else (items[there], values[there])))
        self.leaves.restore(maximum, state.num_stale)


def _leaf_blocks(layout: Layout) -> int:
    """Blocks of leaves of a priority tree: those of the memory, or room for what lies on disk, or moves, too."""
    if not layout.moves:
        return layout.num_blocks
    return most_blocks(layout.max_steps, layout.max_trajectories, layout.block_steps)


def keyed_anchors(kind: Anchor, counts: Array, draw: Draw, stream: int) -> Array:
    """Numbers of the anchors of trajectories that have so many (int64 [n]), int64 [n], with the kernels' numbers."""
    if kind != "uniform":
        return anchors(kind, counts, draw)
    numbers = uniforms(len(counts), key=draw_key(draw, stream), step=draw.step)
    steps: Array = np.minimum((numbers * counts).astype(np.int64), counts - 1)
    return steps


def draw_key(draw: Draw, stream: int) -> int:
    """The key of one stream of a draw's random numbers; its counter is `draw.step`."""
    return key(draw.seed, stream, draw.epoch)


def find(known: Array, wanted: Array) -> tuple[Array, Array]:
    """Index of each of `wanted` in the sorted `known` (0 if absent), and whether it is present."""
    places = np.searchsorted(known, wanted)
    places[places == len(known)] = 0
    found = known[places] == wanted if len(known) else np.zeros(len(wanted), dtype=bool)
    return np.where(found, places, 0), found

"""Launches of the project's kernels, queued on a stream; what runs later are their torch twins."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gear_loader.kernels import append as appending
from gear_loader.kernels import cast as casting
from gear_loader.kernels import (
    cast_reference,
    neighbors,
    neighbors_reference,
    packed_reference,
    priority,
    priority_reference,
    reference,
    uniform_reference,
)
from gear_loader.kernels import gather as gathering
from gear_loader.kernels import items as items_kernels
from gear_loader.kernels import packed as packing
from gear_loader.kernels import place as placing
from gear_loader.kernels import split as splitting
from gear_loader.kernels import store as storing
from gear_loader.kernels import uniform as uniform_kernels
from gear_loader.kernels.append_plan import AppendPlan
from gear_loader.kernels.cast_plan import CastPlan
from gear_loader.kernels.packed_plan import PackedPlan
from gear_loader.kernels.plan import GatherPlan, PlacePlan, with_lines
from gear_loader.kernels.split_plan import SplitPlan
from gear_loader.kernels.sum_tree import STALE, SumTree

from .graphs import Kernel, kind_of
from .memory import View
from .tensors import DeviceTensor

if TYPE_CHECKING:
    from .cuda import Cuda

_NODES = ("leaves", "sums", "mins", "maxs", "maximum", "status")


_given = threading.local()
"""Kernels that this thread's launcher has launched, with grids and arguments, until its twin is queued."""


class _Kernel:
    """In the place of a kernel: checks what the launcher gives it, and keeps it for the twin."""

    def __init__(self, cuda: Cuda, name: str, kernel: Any) -> None:
        self._cuda, self._name = cuda, name
        self.arg_names = list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._take, grid)

    def _take(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        given = [
            View.of(each) if isinstance(each, torch.Tensor) else each
            for each in (*arguments, *itertools.chain(*sorted(constants.items())))
        ]
        _given.arguments = [*getattr(_given, "arguments", ()), self._name, grid, *given]
        _given.kernels = getattr(_given, "kernels", 0) + 1
        for argument in arguments:
            if isinstance(argument, DeviceTensor):
                assert argument.where.index == self._cuda.current, "launched on another device"
            elif isinstance(argument, torch.Tensor):
                assert self._cuda.memory.is_pinned(View.of(argument)), "not readable by a GPU"

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **constants: Any) -> Any:
        """Compile it for these arguments, as Triton does; nothing is launched."""
        self._take(grid, *arguments, **constants)
        kinds = [kind_of(each) for each in arguments]
        values = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        rounded = [ctypes.c_float(each).value if isinstance(each, float) else each for each in values]
        warps = constants.get("num_warps", 4)
        made = Kernel(self._name, grid, list(zip(kinds, rounded, strict=True)), warps)
        signature = dict.fromkeys(self.arg_names, "constexpr") | dict(
            zip(self.arg_names, kinds, strict=False)
        )
        return types.SimpleNamespace(
            run=self._take,
            function=self._cuda.function_of(made),
            metadata=types.SimpleNamespace(name=self._name, num_warps=warps, shared=0),
            src=types.SimpleNamespace(signature=signature),
        )


class _Launch:
    """Queues a twin that gets its tensors when it runs."""

    def __init__(self, cuda: Cuda, device: torch.device, label: str) -> None:
        self._cuda, self._device, self._label = cuda, device, label
        self._reads: list[View] = []
        self._writes: list[View] = []

    def read(self, tensor: torch.Tensor) -> View:
        self._reads.append(View.of(tensor))
        return self._reads[-1]

    def write(self, tensor: torch.Tensor) -> View:
        self._writes.append(View.of(tensor))
        return self._writes[-1]

    def queue(self, call: Callable[[], object]) -> None:
        arguments, _given.arguments = getattr(_given, "arguments", []), []
        count, _given.kernels = getattr(_given, "kernels", 0), 0
        more: dict[str, Any] = {"arguments": arguments, "kernels": count}
        self._cuda.launch(self._device, self._label, call, reads=self._reads, writes=self._writes, **more)


def _same(view: View, expected: torch.Tensor) -> None:
    assert torch.equal(view.tensor(), expected), "a plan's table was overwritten before the kernel read it"


def _bare(column: Any) -> Any:
    """A column without its tensors, which what is recorded must not keep alive."""
    made = copy.copy(column)
    for name, value in vars(column).items():
        if isinstance(value, torch.Tensor):
            object.__setattr__(made, name, None)
    return made


def _numbers_of(known: Any) -> Any:
    """What a launch tells a kernel of a table's index by value."""
    return types.SimpleNamespace(block_steps=known.block_steps, anchors=known.anchors, num_ids=known.num_ids)


def _counted(launch: _Launch, count: int | torch.Tensor, most: int) -> tuple[Callable[[], int], int]:
    """What a launch's number of rows is when it runs, and the most that it may be."""
    if isinstance(count, int):
        return lambda: count, count
    view = launch.read(count)
    return lambda: int(view.tensor()), most


class Launchers:
    """Replacements of the launchers, with their arguments."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._gather, self._place, self._split = gathering.gather, placing.place, splitting.split
        self._gather_packed, self._cast = packing.gather_packed, casting.cast
        self._store, self._append = storing.store, appending.append
        self._neighbors = neighbors.draw
        self._update, self._build = priority.update, priority.build
        self._draw, self._draw_distinct = priority.draw, priority.draw_distinct
        self._draw_uniform = uniform_kernels.draw
        self._locate, self._resolve, self._weigh = (
            items_kernels.locate,
            items_kernels.resolve,
            items_kernels.weigh,
        )

    def _launch(self, device: torch.device, label: str) -> _Launch:
        return _Launch(self._cuda, device, label)

    # ---------------------------------------------------------------- gather and place

    def gather(
        self,
        plan: GatherPlan,
        slots: torch.Tensor,
        anchors: torch.Tensor,
        extent: torch.Tensor,
        block_ids: torch.Tensor,
        *,
        rows: torch.Tensor | None = None,
        programs: int | None = None,
    ) -> None:
        self._gather(plan, slots, anchors, extent, block_ids, rows=rows, programs=programs)
        count = len(slots)
        if count == 0:
            return
        launch = self._launch(plan.device, "gather")
        tables = [
            (launch.read(device_table), with_lines(table).clone()) for _, table, device_table in plan.launches
        ]
        block_steps = plan.block_steps
        given = [launch.read(part) for part in (slots, anchors, extent, block_ids)]
        chosen = None if rows is None else launch.read(rows)
        columns = []
        for column in plan.columns:
            out = launch.write(column.out if rows is not None else column.out[:count])
            mask = column.mask
            if mask is not None:
                mask = launch.write(mask if rows is not None else mask[:count])
            columns.append((_bare(column), launch.read(column.source), out, mask))
        masks = [
            (_bare(each), launch.write(each.out if rows is not None else each.out[:count]))
            for each in plan.masks
        ]

        def run() -> None:
            for view, expected in tables:
                _same(view, expected)
            parts = [
                dataclasses.replace(
                    column,
                    source=source.tensor(),
                    out=out.tensor(),
                    mask=None if mask is None else mask.tensor(),
                )
                for column, source, out, mask in columns
            ]
            played: Any = types.SimpleNamespace(
                columns=parts,
                masks=[dataclasses.replace(each, out=out.tensor()) for each, out in masks],
                block_steps=block_steps,
                check_rows=lambda *_: count,
            )
            reference.gather(
                played, *(view.tensor() for view in given), rows=None if chosen is None else chosen.tensor()
            )

        launch.queue(run)

    def place(
        self, plan: PlacePlan, staging: torch.Tensor, rows: torch.Tensor, *, programs: int | None = None
    ) -> None:
        self._place(plan, staging, rows, programs=programs)
        count = len(rows)
        if count == 0:
            return
        launch = self._launch(plan.device, "place")
        table, source, chosen = launch.read(plan.device_table), launch.read(staging), launch.read(rows)
        outs = [launch.write(out) for out in plan.outs]
        offsets, expected = plan.offsets(count), plan.table.clone()

        def run() -> None:
            _same(table, expected)
            played: Any = types.SimpleNamespace(
                outs=[out.tensor() for out in outs],
                offsets=lambda _: offsets,
                device=torch.device("cpu"),
                check_rows=lambda *_: count,
            )
            reference.place(played, source.tensor(), chosen.tensor())

        launch.queue(run)

    def split(
        self,
        plan: SplitPlan,
        count: int | torch.Tensor,
        *,
        rows: torch.Tensor | None = None,
        programs: int | None = None,
    ) -> None:
        self._split(plan, count, rows=rows, programs=programs)
        if isinstance(count, int) and count == 0:
            return
        launch = self._launch(plan.device, "split")
        known, count = _counted(launch, count, plan.batch_size)
        table, expected = launch.read(plan.device_table), plan.table.clone()
        chosen = None if rows is None else launch.read(rows)
        columns = [
            (
                _bare(column),
                launch.read(column.records if rows is not None else column.records[:count]),
                launch.write(column.out if rows is not None else column.out[:count]),
            )
            for column in plan.columns
        ]

        def run() -> None:
            _same(table, expected)
            parts = [
                dataclasses.replace(column, records=records.tensor(), out=out.tensor())
                for column, records, out in columns
            ]
            played: Any = types.SimpleNamespace(columns=parts, check_rows=lambda *_: known())
            reference.split(played, known(), rows=None if chosen is None else chosen.tensor())

        launch.queue(run)

    def store(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        blocks: torch.Tensor,
        last_bytes: int,
        *,
        programs: int | None = None,
    ) -> None:
        self._store(source, target, blocks, last_bytes, programs=programs)
        launch = self._launch(source.device, "store")
        images, places = launch.read(source), launch.read(blocks)
        # Readers of other blocks of the table are in no order with it: too early a commit shows in the values alone.
        table = View.of(target)
        launch.queue(lambda: reference.store(images.tensor(), table.tensor(), places.tensor(), last_bytes))

    def append(
        self,
        plan: AppendPlan,
        done: torch.Tensor | None,
        ends: torch.Tensor,
        blocks: torch.Tensor,
        *,
        final: bool = False,
        programs: int | None = None,
    ) -> None:
        self._append(plan, done, ends, blocks, final=final, programs=programs)
        launch = self._launch(plan.device, "append")
        table, state, ended = launch.read(plan.device_table), launch.write(plan.state), launch.write(ends)
        mask, places = None if done is None else launch.read(done), launch.read(blocks)
        columns = [
            (launch.read(each.rows), launch.write(each.image), View.of(each.target), each.step_bytes)
            for each in plan.columns
        ]
        block_steps, lanes = plan.block_steps, plan.lanes

        def run() -> None:
            addresses = [[view.address for view in column[:3]] for column in columns]
            assert table.tensor()[:, :3].tolist() == addresses, "a plan's table was overwritten"
            now = [
                types.SimpleNamespace(
                    rows=rows.tensor(), image=image.tensor(), target=target.tensor(), step_bytes=size
                )
                for rows, image, target, size in columns
            ]
            played: Any = types.SimpleNamespace(
                columns=now, state=state.tensor(), block_steps=block_steps, lanes=lanes
            )
            reference.append(
                played, None if mask is None else mask.tensor(), ended.tensor(), places.tensor(), final=final
            )

        launch.queue(run)

    # ---------------------------------------------------------------- packed batches, conversions

    def gather_packed(self, plan: PackedPlan, work: torch.Tensor, *, programs: int | None = None) -> None:
        self._gather_packed(plan, work, programs=programs)
        launch = self._launch(plan.device, "gather packed")
        # What waits keeps no memory alive, as a kernel's arguments do not. Sources are known when it runs.
        words, position = launch.read(work), launch.write(plan.position)
        for each in plan.columns:
            launch.write(each.out)
        check = self._cuda.memory.check_readable

        def bytes_at(address: int, count: int) -> torch.Tensor:
            view = View.at(address, (count,), torch.uint8)
            check(view)
            return view.tensor()

        def run() -> None:
            packed_reference.run(words.tensor(), position.tensor(), bytes_at)

        launch.queue(run)

    def cast(self, plan: CastPlan, count: int | torch.Tensor, *, programs: int | None = None) -> None:
        self._cast(plan, count, programs=programs)
        if isinstance(count, int) and count == 0:
            return
        launch = self._launch(plan.device, "cast")
        known, count = _counted(launch, count, plan.num_rows)
        tables = [(launch.read(device_table), table.clone()) for _, table, device_table in plan.launches]
        columns = [
            (_bare(each), launch.read(each.source[:count]), launch.write(each.out[:count]))
            for each in plan.columns
        ]

        def run() -> None:
            for view, expected in tables:
                _same(view, expected)
            parts = [
                dataclasses.replace(each, source=source.tensor(), out=out.tensor())
                for each, source, out in columns
            ]
            played: Any = types.SimpleNamespace(columns=parts, check_count=lambda count: count)
            cast_reference.cast(played, known())

        launch.queue(run)

    # ---------------------------------------------------------------- the tree

    def _tree(self, launch: _Launch, tree: SumTree) -> Callable[[], SumTree]:
        views = {name: launch.write(getattr(tree, name)) for name in _NODES}
        levels = launch.read(tree.levels)
        kept = copy.copy(tree)  # whose tensors nobody looks at, and keeps none of them
        kept.device = torch.device("cpu")
        for name in (*_NODES, "levels"):
            setattr(kept, name, None)

        def now() -> SumTree:
            made = copy.copy(kept)
            for name, view in views.items():
                setattr(made, name, view.tensor())
            made.levels = levels.tensor()
            assert made.levels.tolist() == [list(level) for level in made.shape]
            return made

        return now

    def update(self, tree: SumTree, items: torch.Tensor, values: torch.Tensor, **options: Any) -> None:
        self._update(tree, items, values, **options)
        launch = self._launch(tree.device, "update")
        now, which, new = self._tree(launch, tree), launch.read(items), launch.read(values)
        launch.queue(lambda: priority_reference.update(now(), which.tensor(), new.tensor(), **options))

    def build(self, tree: SumTree) -> None:
        self._build(tree)
        launch = self._launch(tree.device, "build")
        now = self._tree(launch, tree)
        launch.queue(lambda: priority_reference.build(now()))

    def draw(self, tree: SumTree, random: torch.Tensor, items: torch.Tensor, values: torch.Tensor) -> None:
        self._draw(tree, random, items, values)
        self._queue_draw(priority_reference.draw, tree, random, items, values)

    def draw_distinct(
        self,
        tree: SumTree,
        random: torch.Tensor,
        items: torch.Tensor,
        values: torch.Tensor,
        scratch: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._draw_distinct(tree, random, items, values, scratch)
        self._queue_draw(priority_reference.draw_distinct, tree, random, items, values, *scratch)

    def _queue_draw(
        self,
        twin: Callable[..., None],
        tree: SumTree,
        random: torch.Tensor,
        *outs: torch.Tensor,
    ) -> None:
        launch = self._launch(tree.device, "draw")
        now, numbers = self._tree(launch, tree), launch.read(random)
        views = [launch.write(out) for out in outs]

        def run() -> None:
            items, values, *scratch = (view.tensor() for view in views)
            for part in scratch:
                part.fill_(7)
            twin(now(), numbers.tensor(), items, values)

        launch.queue(run)

    # ---------------------------------------------------------------- graphs of nodes

    def draw_neighbors(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        nodes: torch.Tensor,
        random: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._neighbors(indptr, indices, nodes, random, out)
        launch = self._launch(nodes.device, "draw neighbors")
        given, drawn = [launch.read(part) for part in (indptr, indices, nodes, random)], launch.write(out)
        launch.queue(lambda: neighbors_reference.draw(*(view.tensor() for view in given), drawn.tensor()))

    # ---------------------------------------------------------------- items and rows

    def weigh(
        self, tree: SumTree, leaves: torch.Tensor, weights: torch.Tensor, *, beta: torch.Tensor, table: bool
    ) -> None:
        self._weigh(tree, leaves, weights, beta=beta, table=table)
        launch = self._launch(tree.device, "weigh")
        mins, given, out = launch.read(tree.mins), launch.read(leaves), launch.write(weights)
        exponents = launch.read(beta)
        offset = tree.shape[-1][0]

        def run() -> None:
            found = given.tensor().double()
            exponent = float(exponents.tensor())
            some = found[found > 0]
            least = mins.tensor()[offset : offset + 32].min() if table else some.min() if len(some) else 1.0
            ratio = torch.where(found > 0, least / found.clamp(min=1e-300), 1.0)
            out.tensor().copy_(torch.where(found > 0, torch.exp2(exponent * torch.log2(ratio)), 0.0))

        launch.queue(run)

    def _index(self, launch: _Launch, known: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
        """The table's index in host memory, as it is when the kernel runs."""
        addresses, check = launch.read(known.addresses), self._cuda.memory.check_readable
        slots, num_ids = len(known.known), known.num_ids

        def now() -> tuple[torch.Tensor, ...]:
            shapes = ((slots,), (slots, 3), (num_ids,))
            kinds = (torch.int64, torch.int64, torch.int32)
            views = [View.at(*each) for each in zip(addresses.tensor().tolist(), shapes, kinds, strict=True)]
            for view in views:
                check(view)
            return tuple(view.tensor() for view in views)

        return now

    def resolve(
        self,
        known: Any,
        items: torch.Tensor,
        random: torch.Tensor,
        rows: torch.Tensor,
        ids: torch.Tensor,
        **options: Any,
    ) -> None:
        self._resolve(known, items, random, rows, ids, **options)
        launch = self._launch(known.known.device, "resolve")
        index, given, numbers = self._index(launch, known), launch.read(items), launch.read(random)
        blocks = None
        if known.blocks is not None:
            blocks = launch.read(known.blocks.owner), launch.read(known.blocks.number)
        outs, told = (launch.write(rows), launch.write(ids)), _numbers_of(known)

        def run() -> None:
            held = None if blocks is None else tuple(view.tensor() for view in blocks)
            _resolve(
                told,
                index(),
                held,
                given.tensor(),
                numbers.tensor(),
                *(out.tensor() for out in outs),
                **options,
            )

        launch.queue(run)

    def draw_uniform(
        self, random: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, **options: Any
    ) -> None:
        self._draw_uniform(random, rows, ids, **options)
        launch = self._launch(ids.device, "draw uniform")
        words, outs = launch.read(random), (launch.write(rows), launch.write(ids))
        check = self._cuda.memory.check_readable

        def tensor_at(*given: Any) -> torch.Tensor:
            view = View.at(*given)
            check(view)
            return view.tensor()

        def run() -> None:
            places = (out.tensor() for out in outs)
            uniform_reference.draw(words.tensor(), *places, **options, tensor_at=tensor_at)

        launch.queue(run)

    def locate(
        self,
        tree: SumTree,
        known: Any,
        index: torch.Tensor,
        items: torch.Tensor,
        *,
        anchor: torch.Tensor | None = None,
        generation: torch.Tensor | None = None,
    ) -> None:
        self._locate(tree, known, index, items, anchor=anchor, generation=generation)
        launch = self._launch(tree.device, "locate")
        held, slots = launch.read(known.known), launch.read(index)
        steps = None if anchor is None else launch.read(anchor)
        generations = None if generation is None else launch.read(generation)
        blocks: dict[str, View] = {}
        if known.blocks is not None:
            blocks = {name: launch.read(part) for name, part in vars(known.blocks).items()}
        host, status, out = self._index(launch, known), launch.write(tree.status), launch.write(items)
        told = _numbers_of(known)

        def run() -> None:
            now = {name: view.tensor() for name, view in blocks.items()}
            found = _locate(
                told,
                host(),
                held.tensor(),
                now,
                slots.tensor(),
                None if steps is None else steps.tensor(),
                None if generations is None else generations.tensor(),
            )
            status.tensor()[STALE] += int((found < 0).sum())
            out.tensor().copy_(found)

        launch.queue(run)


def _resolve(
    known: Any,
    index: tuple[torch.Tensor, ...],
    blocks: tuple[torch.Tensor, ...] | None,
    items: torch.Tensor,
    random: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    *,
    anchor: str,
    first: int,
    last: int,
    once: bool = False,
) -> None:
    """The twin of `gear_loader.kernels.items.resolve`, on the host."""
    generation, extent, block_ids = index
    count, block_steps, width = len(items), known.block_steps, ids.shape[1]
    here = items >= 0
    slots = items.clamp(min=0)
    if blocks is not None:
        owner, number = blocks
        block = slots // block_steps
        anchors = number[block].long() * block_steps + slots - block * block_steps
        slots = owner[block].long()
    steps, start, final = (torch.where(here, part, 0) for part in extent[slots].unbind(1))
    if blocks is None:
        lead, ahead, ahead_final = known.anchors
        choices = steps - lead - torch.maximum(torch.full_like(steps, ahead), ahead_final - final)
        if anchor == "uniform":
            pair = random[[2, 1]]
            uniform = priority_reference.uniforms(pair, torch.arange(count, device="cpu"), 0)
            anchors = torch.minimum((uniform * choices.double()).long(), choices - 1)
        else:
            anchors = choices * 0 if anchor == "first" else choices - 1
        anchors = anchors + lead
    low, high = (
        torch.minimum((anchors + edge).clamp(min=0), end - 1).div(block_steps, rounding_mode="trunc")
        for edge, end in ((first, steps), (last, steps + final))
    )
    own = torch.arange(count, device="cpu") * width
    rows[0, :count] = torch.where(here, slots, -1)
    rows[1, :count] = torch.where(here, anchors, 0)
    rows[2, :count] = torch.where(here, generation[slots], 0)
    places = rows[3:].reshape(-1, 3)
    assert places.data_ptr() == rows[3:].data_ptr()
    places[:count] = torch.stack((steps, torch.where(here, own - low, own), final), dim=1)
    for k in range(width):
        inside = here & (low + k <= high)
        ids[:count, k] = torch.where(inside, block_ids[torch.where(inside, start + low + k, 0)], 0)
    if once:
        ids[:count, width - 1] = torch.where(here, block_ids[torch.where(here, start, 0)], 0)


def _locate(
    known: Any,
    index: tuple[torch.Tensor, ...],
    held: torch.Tensor,
    blocks: dict[str, torch.Tensor],
    slots: torch.Tensor,
    steps: torch.Tensor | None,
    generations: torch.Tensor | None,
) -> torch.Tensor:
    """The twin of `gear_loader.kernels.items.locate`, on the host."""
    _, extent, block_ids = index
    here = (slots >= 0) & (slots < len(held))
    at = torch.where(here, slots, 0)
    here &= held[at] != 0
    if generations is not None:
        here &= generations.int() == held[at]
    if not blocks:
        return torch.where(here, slots, -1)
    assert steps is not None
    block_steps = known.block_steps
    here &= (steps >= known.anchors[0]) & (steps < blocks["steps"][at])
    number = torch.where(here, steps // block_steps, 0)
    place = (extent[at, 1] + number).clamp(0, known.num_ids - 1)
    block = block_ids[place].long().clamp(0, len(blocks["place"]) - 1)
    here &= blocks["place"][block] == blocks["first"][at] + number
    inside = steps - number * block_steps
    own = blocks["number"][block].long() * block_steps + inside
    end = blocks["steps"][torch.where(here, blocks["owner"][block].long(), 0)]
    here &= (own >= known.anchors[0]) & (own < end)
    return torch.where(here, block * block_steps + inside, -1)


def install(cuda: Cuda, patch: pytest.MonkeyPatch) -> None:
    """Replace launchers and kernels until the patch is undone."""
    launchers = Launchers(cuda)
    _given.arguments, _given.kernels = [], 0
    for module, names in (
        (gathering, ("gather",)),
        (placing, ("place",)),
        (splitting, ("split",)),
        (storing, ("store",)),
        (appending, ("append",)),
        (packing, ("gather_packed",)),
        (casting, ("cast",)),
        (priority, ("update", "build", "draw", "draw_distinct")),
        (items_kernels, ("locate", "resolve", "weigh")),
    ):
        for name in [each for each in vars(module) if each.endswith("_kernel")]:
            patch.setattr(module, name, _Kernel(cuda, name, getattr(module, name)))
        for name in names:
            patch.setattr(module, name, getattr(launchers, name))
    patch.setattr(
        uniform_kernels, "uniform_kernel", _Kernel(cuda, "uniform_kernel", uniform_kernels.uniform_kernel)
    )
    patch.setattr(uniform_kernels, "draw", launchers.draw_uniform)
    patch.setattr(
        neighbors, "neighbors_kernel", _Kernel(cuda, "neighbors_kernel", neighbors.neighbors_kernel)
    )
    patch.setattr(neighbors, "draw", launchers.draw_neighbors)

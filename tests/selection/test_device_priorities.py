"""Selection by priority as a GPU does it, under Triton's interpreter: row by row what the CPU does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from cuda_common import FakeCuda

import gear_loader as gear
from gear_loader.errors import PriorityError, SchemaError, StaleIndexError, TableEmptyError
from gear_loader.selection.base import Anchor, SelectionContext
from gear_loader.selection.complete import CompleteAnchors
from gear_loader.selection.cuda_leaves import CudaLeaves
from gear_loader.selection.prioritized import PrioritizedSelection
from gear_loader.selection.prioritized_cuda import CudaPrioritizedSelection
from gear_loader.selection.samplers import Draw, Sampler
from gear_loader.storage.readers import Ticket
from gear_loader.storage.selected_rows import DrawPlaces
from gear_loader.utils.launch_graph import RepeatedWork

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here, for CUDA tensors only"
)

CPU = torch.device("cpu")
BATCH, REACH, BLOCKS = 24, (-5, 6), 4
COMPLETE = CompleteAnchors(2, 1, 3)
# A power of numpy's and one of Triton's interpreter may round differently, by one place of float32.
CLOSE = {"rtol": 2.4e-7, "atol": 0.0}


@pytest.fixture
def table() -> Iterator[gear.Table]:
    schema = {"value": gear.Column(torch.float32, (2,), final=True)}
    with gear.Table.create(
        schema, max_steps=500, max_trajectories=60, block_steps=8, on_full="evict_oldest"
    ) as made:
        random = np.random.default_rng(0)
        for number in range(50):
            add(made, random, number)
        yield made


def add(table: gear.Table, random: np.random.Generator, number: int) -> None:
    length = int(random.integers(1, 20))
    priority = None if number % 3 else float(number)
    last = None if number % 4 else {"value": np.full(2, -number, np.float32)}
    table.add({"value": np.full((length, 2), number, np.float32)}, priority=priority, final=last)


def both(
    table: gear.Table,
    sampler: Sampler,
    anchor: Anchor = "uniform",
    subset: Any = None,
    complete: CompleteAnchors | None = None,
) -> Any:
    context = SelectionContext(table, sampler, anchor, subset, complete=complete)
    return CudaPrioritizedSelection(context, history=4, device=CPU), PrioritizedSelection(context, history=4)


def drawn(selection: CudaPrioritizedSelection, draw: Draw) -> tuple[torch.Tensor, ...]:
    """What the kernels write for a batch, with poison before."""
    mirror: tuple[torch.Tensor, ...] = (
        torch.full((6, BATCH), -7, dtype=torch.int64),
        torch.full((BATCH, BLOCKS), -7, dtype=torch.int32),
    )
    if selection.context.sampler.weighs:
        mirror += (torch.full((BATCH,), torch.nan),)
    random, beta = torch.empty(3, dtype=torch.int64), torch.empty(1)
    ticket = Ticket()
    try:
        selection.priorities.follow(ticket)
        places = DrawPlaces(random, beta, mirror, mirror[0], REACH, RepeatedWork(), True, lambda: None)
        selection._prepare_draw(draw, places)
        selection._launch_draw(draw, places)
        selection.priorities.leaves.leave()
    finally:
        ticket.end()
    return mirror


def expected(selection: PrioritizedSelection, draw: Draw) -> Any:
    ticket = Ticket()
    try:
        selection.priorities.follow(ticket)
        rows = selection._draw(draw)
        if rows.leaves is not None and selection.context.sampler.weighs:
            rows = dataclasses.replace(rows, weights=selection._importance(draw, rows.leaves))
        return rows
    finally:
        ticket.end()


def now(call: Callable[[], object]) -> None:
    call()


def update(selection: PrioritizedSelection, rows: Any, priority: torch.Tensor, **options: Any) -> None:
    step = selection.context.sampler.unit == "step"
    selection.update_priority(
        torch.from_numpy(rows.slots),
        priority,
        generation=torch.from_numpy(options.pop("generations", rows.generations)),
        anchor=torch.from_numpy(rows.steps) if step else None,
        stale=options.pop("stale", "ignore"),
        between=now,
    )


SAMPLERS = {
    "prioritized": lambda unit: gear.Prioritized(eps=1e-3, unit=unit),
    "distinct": lambda unit: gear.Prioritized(1.0, replacement=False, normalize="batch", unit=unit),
    "top": lambda unit: gear.TopK(unit=unit),
    "bottom": lambda unit: gear.TopK(False, unit=unit),
}


DRAWN = [
    ("prioritized", "step", "uniform", None),
    ("prioritized", "step", "uniform", COMPLETE),
    ("distinct", "trajectory", "first", COMPLETE),
    ("top", "trajectory", "last", None),
    ("bottom", "trajectory", "uniform", COMPLETE),
]


@pytest.mark.parametrize(("name", "unit", "anchor", "complete"), mostly_long(DRAWN, DRAWN[1], DRAWN[3]))
def test_batches_are_those_of_the_cpu_while_the_table_changes(
    table: gear.Table, name: str, unit: Any, anchor: Anchor, complete: CompleteAnchors | None
) -> None:
    make = SAMPLERS[name]
    device, host = both(table, make(unit), anchor, complete=complete)
    random = np.random.default_rng(1)
    writer = table.writer(chunk_steps=24, overlap_steps=16)  # whose trajectories share blocks
    extent, block_ids = table._engine.reader().index_arrays()
    for step in range(6):
        draw = Draw(3, 1, step, 0, BATCH, 0, step)
        rows, found = expected(host, draw), drawn(device, draw)
        np.testing.assert_allclose(
            device.priorities.leaves.wide.leaves[: host.priorities.items.capacity],
            host.priorities.leaves.tree.leaves[: host.priorities.items.capacity],
            **CLOSE,
        )
        np.testing.assert_array_equal(found[0][:3], np.stack((rows.slots, rows.steps, rows.generations)))
        if rows.weights is not None:
            np.testing.assert_allclose(found[2], rows.weights, rtol=1e-6)
        looked_up = found[0][3:].reshape(BATCH, 3)
        for row, (slot, anchor_step) in enumerate(zip(rows.slots, rows.steps, strict=True)):
            length, _, final = extent[slot]
            assert looked_up[row, [0, 2]].tolist() == [length, final]
            if complete is not None:
                assert 2 <= anchor_step < length - max(1, 3 - final)
            first, last = (np.clip(anchor_step + reach, 0, length + final - 1) // 8 for reach in REACH)
            for block in range(first, last + 1):
                assert found[1].reshape(-1)[looked_up[row, 1] + block] == block_ids[extent[slot, 1] + block]
        generations = rows.generations.copy()
        generations[::7] += 1  # as if these were gone
        priority = torch.from_numpy(random.random(BATCH).astype(np.float32))
        for selection in (device, host):
            update(selection, rows, priority, generations=generations)
        assert device.num_stale == host.num_stale == (step + 1) * 4
        add(table, random, 50 + step)
        writer.append({"value": np.full((13, 2), 900 + step, np.float32)})
        if step == 3:
            table.remove(int(table.indices()[5]))
    states = [selection.state_dict() for selection in (device, host)]
    np.testing.assert_allclose(states[0]["leaves"], states[1]["leaves"], **CLOSE)
    assert states[0]["maximum"] == states[1]["maximum"]
    # Batches can be repeated as long as all of their trajectories are there.
    assert {part["step"] for part in states[0]["recent"]} <= {2, 3, 4, 5}
    restored, _ = both(table, make(unit), anchor, complete=complete)
    restored.load_state_dict(states[0])
    for name in ("leaves", "sums", "mins", "maxs"):
        assert torch.equal(
            getattr(restored.priorities.leaves.wide, name), getattr(device.priorities.leaves.wide, name)
        )


def shared_steps(table: gear.Table) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every step of every trajectory: slots, generations, steps."""
    slots, lengths = table.indices(), table.lengths()
    rows = np.repeat(slots, lengths)
    steps = np.concatenate([np.arange(length) for length in lengths])
    return tuple(
        torch.from_numpy(part) for part in (rows, table._engine.reader().slot_states()[1][rows], steps)
    )  # type: ignore[return-value]


@pytest.mark.parametrize(("stale", "complete"), [("ignore", CompleteAnchors(5, 4, 2)), ("error", None)])
def test_updates_of_shared_steps_are_those_of_the_cpu(
    table: gear.Table, stale: Any, complete: CompleteAnchors | None
) -> None:
    """Whichever of the trajectories that have a step names it, while writers go on between the draw and the update."""
    device, host = both(table, gear.Prioritized(1.0, unit="step"), complete=complete)
    random = np.random.default_rng(4)
    writers = [
        table.writer(chunk_steps=chunk, overlap_steps=overlap) for chunk, overlap in ((24, 16), (32, 8))
    ]
    errors = 0

    def write(number: int) -> None:
        for writer in writers:
            writer.append({"value": np.full((random.integers(1, 20), 2), number, np.float32)})

    write(0)
    for turn in range(10):
        for selection in (device, host):
            ticket = Ticket()
            selection.priorities.follow(ticket)
            ticket.end()
        names = shared_steps(table)
        for _ in range(int(random.integers(0, 3))):
            write(turn)  # commits, evicts, and makes other trajectories share blocks
        if turn % 3 == 2:
            add(table, random, turn)
            table.remove(int(table.indices()[int(random.integers(len(table)))]))
        rows = torch.from_numpy(random.permutation(len(names[0]))[:60])  # some of them name the same step
        slots, generations, steps = (part[rows] for part in names)
        priority = torch.from_numpy(random.random(len(rows)).astype(np.float32))
        messages = []
        for selection in (device, host):
            try:
                selection.update_priority(
                    slots, priority, generation=generations, anchor=steps, stale=stale, between=now
                )
                messages.append("")
            except StaleIndexError as error:
                messages.append(str(error))
        assert messages[0] == messages[1]
        errors += bool(messages[0])
        assert device.num_stale == host.num_stale
        capacity = host.priorities.items.capacity
        assert (
            device.priorities.leaves.wide.leaves[:capacity].numpy().tobytes()
            == host.priorities.leaves.tree.leaves[:capacity].tobytes()
        )
        assert float(device.priorities.leaves.wide.maximum) == host.priorities.leaves.maximum
    assert host.priorities.items._others  # steps were shared to the end
    assert (errors > 0) == (stale == "error")
    assert (host.num_stale > 0) == (stale == "ignore")


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_invalid_rows_are_stale(table: gear.Table, unit: Any) -> None:
    device, host = both(table, gear.Prioritized(unit=unit))
    draw = Draw(0, 0, 0, 0, BATCH)
    gone = int(expected(host, draw).slots[0])
    drawn(device, draw)
    before = device.priorities.leaves.wide.leaves.clone()

    def give(slots: list[int], steps: list[int], generation: Any = None, stale: Any = "ignore") -> None:
        anchor = torch.tensor(steps) if unit == "step" else None
        device.update_priority(
            torch.tensor(slots),
            torch.ones(len(slots)),
            generation=generation,
            anchor=anchor,
            stale=stale,
            between=now,
        )

    give([-1, 60, 2**40, gone], [0, 0, 0, 10_000], torch.tensor([1, 1, 1, 2**33]))
    assert device.num_stale == 4
    assert torch.equal(device.priorities.leaves.wide.leaves, before)
    table.remove(gone)
    drawn(device, draw)
    give([gone], [0])
    assert device.num_stale == 5
    message = f"1 of 1 priorities are for removed trajectories.*index {gone}"
    with pytest.raises(StaleIndexError, match=message):
        give([gone], [0], stale="error")


@pytest.mark.parametrize("bad", [float("nan"), 1e38])
def test_a_bad_priority_that_only_the_gpu_sees_changes_nothing_and_is_raised_later(
    table: gear.Table, bad: float
) -> None:
    device, host = both(table, gear.Prioritized(alpha=2.0))
    draw = Draw(0, 0, 0, 0, BATCH)
    rows = expected(host, draw)
    drawn(device, draw)
    before = device.priorities.leaves.wide.leaves.clone()
    priority = torch.ones(BATCH)
    priority[5] = bad
    update(device, rows, priority)
    with pytest.raises(PriorityError, match=r"priority\[5\] of an earlier update_priority was NaN"):
        update(device, rows, torch.ones(BATCH))
    assert torch.equal(device.priorities.leaves.wide.leaves, before)
    update(device, rows, torch.full((BATCH,), 2.0))  # it is over
    assert not torch.equal(device.priorities.leaves.wide.leaves, before)


@pytest.mark.parametrize("first", [[1e-20, 2e-20], [1e30, 2e30]], ids=["too small", "too large"])
def test_priorities_out_of_range_are_an_error_where_the_host_raises_it(
    table: gear.Table, first: list[float]
) -> None:
    table.remove(table.indices())
    indices = [table.add({"value": np.zeros((3, 2), np.float32)}, priority=priority) for priority in first]
    device, host = both(table, gear.Prioritized(alpha=2.0))
    with pytest.raises(PriorityError) as caught:
        expected(host, Draw(0, 0, 0, 0, BATCH))
    drawn(device, Draw(0, 0, 0, 0, BATCH))
    with pytest.raises(PriorityError) as late:
        device.priorities.leaves.raise_late()
    assert str(late.value) == str(caught.value)
    assert "out of float32's range" in str(late.value)
    device.priorities.leaves.raise_late()  # it is over
    for selection in (device, host):
        selection.update_priority(
            torch.tensor(indices),
            torch.tensor([1.0, 2.0]),
            generation=None,
            anchor=None,
            stale="ignore",
            between=now,
        )
    rows = expected(host, Draw(0, 0, 1, 0, BATCH))
    assert (drawn(device, Draw(0, 0, 1, 0, BATCH))[0][0].numpy() == rows.slots).all()
    device.priorities.leaves.raise_late()


def test_errors_are_looked_for_while_no_other_thread_draws_or_updates(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, host = both(table, gear.Prioritized())
    look, owned = CudaLeaves.raise_late, []

    def looks(self: CudaLeaves, **options: Any) -> None:
        owned.append(device.priorities.mutex._is_owned())
        look(self, **options)

    monkeypatch.setattr(CudaLeaves, "raise_late", looks)
    draw = Draw(0, 0, 0, 0, BATCH)
    ticket = device.new_ticket()
    device.draw(draw, ticket)
    ticket.end()
    update(device, expected(host, draw), torch.ones(BATCH))
    assert owned == [True, True]


def test_a_tree_without_positive_priorities_gives_padding_and_an_error_later(table: gear.Table) -> None:
    device, _ = both(table, gear.Prioritized(alpha=1.0))
    table.remove(table.indices())
    index = table.add({"value": np.zeros((3, 2), np.float32)}, priority=0.0)
    rows, _, weights = drawn(device, Draw(0, 0, 0, 0, BATCH))
    assert (rows[0] == -1).all()
    assert (rows[3:].reshape(BATCH, 3)[:, 0] == 0).all()
    assert (weights == 0).all()
    with pytest.raises(PriorityError, match="no item left with a positive priority"):
        device.priorities.leaves.raise_late()
    device.priorities.leaves.raise_late()
    options: Any = {"generation": None, "anchor": None, "stale": "ignore", "between": now}
    device.update_priority(torch.tensor([index]), torch.ones(1), **options)
    assert (drawn(device, Draw(0, 0, 1, 0, BATCH))[0][0] == index).all()
    table.remove(index)
    drawn(device, Draw(0, 0, 2, 0, BATCH))
    with pytest.raises(TableEmptyError):
        device.priorities.leaves.raise_late()


def test_wrong_tensors_are_refused_before_anything_is_queued(table: gear.Table) -> None:
    device, _ = both(table, gear.Prioritized())
    two = torch.zeros(2, dtype=torch.int64)
    calls: list[tuple[Any, Any, Any, Any, str]] = [
        (two.float(), torch.ones(2), None, None, r"index is torch.float32 \[2\]; expected integers \[2\]"),
        (two, torch.ones(3), None, None, r"priority is torch.float32 \[3\]; expected numbers \[2\]"),
        (two, torch.ones(2), two[:1], None, r"generation is torch.int64 \[1\]; expected integers \[2\]"),
        (two[None], torch.ones(2), None, None, r"index is torch.int64 \[1, 2\]; expected integers \[n\]"),
        (two, torch.ones(2), None, two, "anchor was received; with unit='trajectory'"),
    ]
    for index, priority, generation, anchor, message in calls:
        with pytest.raises(SchemaError, match=message):
            device.update_priority(
                index, priority, generation=generation, anchor=anchor, stale="ignore", between=now
            )
    assert device.num_stale == 0


def test_quantiles_wait_for_the_updates_before_them(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    device, host = both(table, gear.Prioritized(1.0))
    rows = expected(host, Draw(0, 0, 0, 0, BATCH))
    drawn(device, Draw(0, 0, 0, 0, BATCH))
    for selection in (device, host):
        update(selection, rows, torch.arange(1.0, BATCH + 1))
    # From here on as on a GPU: updates were queued on another stream.
    leaves = device.priorities.leaves
    leaves.cuda, leaves._last = True, torch.cuda.Event()
    stream: Any = torch.cuda.current_stream()
    shares = np.array([0.0, 0.5, 1.0])
    np.testing.assert_array_equal(device.quantiles(shares), host.quantiles(shares))
    assert stream.waited == [leaves._last]
    assert len(cuda.recorded) >= 7  # nor is the tree's memory given away before this stream has read it


def test_priorities_of_float64_beyond_float32_keep_their_sign(table: gear.Table) -> None:
    device, host = both(table, gear.Prioritized(alpha=1.0))
    rows = expected(host, Draw(0, 0, 0, 0, BATCH))
    drawn(device, Draw(0, 0, 0, 0, BATCH))
    update(device, rows, torch.full((BATCH,), 1e-300, dtype=torch.float64))
    assert (device.priorities.leaves.wide.leaves[rows.slots] == torch.finfo(torch.float32).tiny).all()
    update(device, rows, torch.full((BATCH,), -1e-300, dtype=torch.float64))
    with pytest.raises(PriorityError, match=r"priority\[0\] of an earlier update_priority"):
        device.priorities.leaves.raise_late()

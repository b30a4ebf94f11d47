"""Anchors at multiples of a stride: which sequences are drawn, against the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import gear_loader as gear
from gear_loader.errors import SchemaError

SCHEMA = {"obs": gear.Column(torch.int64, final=True), "action": gear.Column(torch.int64)}


def anchors_of(table: gear.Table, length: int, stride: int, *, complete: bool) -> list[tuple[int, int]]:
    """By definition: (slot, step) of each sequence; windows of `length` actions and one observation more."""
    found = []
    for slot, steps in zip(table.indices().tolist(), table.lengths().tolist(), strict=True):
        valid = steps - (table.final(slot) is None)  # steps with an observation after them
        anchor = 0
        while anchor < valid:
            reaches = anchor + length >= valid
            if not complete or anchor + length <= valid:
                found.append((slot, anchor))
            if reaches and not complete:
                break
            anchor += stride
    return found


def rows_of(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True))


@given(data=st.data())
@settings(max_examples=examples(30), deadline=None)
def test_sequences_against_the_definition(data: Any) -> None:
    """Of trajectories that grow, end and are removed, for draws that know the table from before."""
    stride = data.draw(st.integers(1, 6), "stride")
    length = data.draw(st.integers(1, 9), "length")
    block_steps = data.draw(st.integers(1, stride), "block_steps")
    complete = data.draw(st.booleans(), "complete")
    windows = {"obs": gear.Window(length + 1), "action": gear.Window(length)}
    with gear.Table.create(SCHEMA, max_steps=400, max_trajectories=40, block_steps=block_steps) as table:

        def dataset(sampler: Any, size: int) -> gear.ReplayDataset:
            return gear.ReplayDataset(
                table,
                windows=windows,
                sampler=sampler,
                batch_size=size,
                draws=gear.Draws(stride=stride, complete=complete),
                device="cpu",
                prefetch=0,
            )

        every = dataset(gear.TopK(unit="step"), 400)
        passes = dataset(gear.Uniform(unit="step", replacement=False), 7)
        weighed = dataset(gear.Prioritized(unit="step"), 64)
        uniform = dataset(None, 64)
        writer = table.writers(2, commit_every_step=True)
        number = 0
        for _ in range(data.draw(st.integers(2, 6), "rounds")):
            for _ in range(data.draw(st.integers(1, 15), "steps")):
                number += 1
                row = np.array([number, -number])
                done = np.array([data.draw(st.integers(0, 5)) == 0 for _ in range(2)])
                last = {"obs": row + 1} if data.draw(st.booleans()) else None
                writer.append(obs=row, action=row, done=done, final=last)
            if data.draw(st.booleans(), "whole"):
                steps = np.arange(data.draw(st.integers(1, 20)))
                table.add({"obs": steps, "action": steps}, final={"obs": 5} if number % 2 else None)
            if len(table) > 4:
                table.remove(int(table.indices()[0]))
            allowed = anchors_of(table, length, stride, complete=complete)
            if not allowed:
                continue
            assert set(rows_of(every.sample())) == set(allowed)
            assert uniform.stats()["anchors"] == len(allowed)
            assert sorted(row for batch in passes for row in rows_of(batch)) == sorted(allowed)
            for replay in (weighed, uniform):
                batch = replay.sample()
                assert set(rows_of(batch)) <= set(allowed)
            weighed.update_priority(batch := weighed.sample(), np.zeros(64))
            if left := set(allowed) - set(rows_of(batch)):
                assert set(rows_of(weighed.sample())) <= left
            weighed.update_priority(batch, np.ones(64))


def test_states_resume_and_options_differ() -> None:
    with gear.Table.create(SCHEMA, max_steps=400, max_trajectories=40, block_steps=4) as table:
        for length in (20, 3, 11):
            table.add({"obs": np.arange(length), "action": np.arange(length)})
        options: dict[str, Any] = {"windows": gear.Window(6), "batch_size": 8, "device": "cpu", "prefetch": 0}
        sampler = gear.Prioritized(unit="step")
        one = gear.ReplayDataset(table, sampler=sampler, draws=gear.Draws(stride=4), **options)
        one.update_priority(one.sample(), np.arange(8.0))
        two = gear.ReplayDataset(table, sampler=sampler, draws=gear.Draws(stride=4), **options)
        two.load_state_dict(one.state_dict())
        assert rows_of(one.sample()) == rows_of(two.sample())
        other = gear.ReplayDataset(table, sampler=sampler, draws=gear.Draws(stride=5), **options)
        with pytest.raises(SchemaError, match="stride"):
            other.load_state_dict(one.state_dict())
        with pytest.raises(SchemaError, match="block_steps of at most the stride"):
            gear.ReplayDataset(table, sampler=sampler, draws=gear.Draws(stride=3), **options).sample()
        for wrong in (
            {"sampler": gear.Uniform()},
            {"draws": gear.Draws(anchor="first", stride=4)},
            {"draws": gear.Draws(stride=2), "windows": gear.Whole()},
        ):
            with pytest.raises(SchemaError, match="stride"):
                gear.ReplayDataset(table, **{**options, "draws": gear.Draws(stride=4), **wrong})
        with pytest.raises(SchemaError, match="stride is 0"):
            gear.Draws(stride=0)

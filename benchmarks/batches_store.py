"""What batches of `benchmarks.batches` are taken from, and what each of them has to hold.

Every store holds the same trajectories, which each process makes again from a seed (`batches_peers.Source`): random
numbers, and one column that numbers all steps, so that every row of every batch says what it has to hold. Before
anything is timed, the rows of many batches are compared with that to the byte, the frequencies of draws with what they
should be, and importance weights with the priorities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.harness import Incorrect
from benchmarks.peers.batches_peers import ALPHA, BETA, Source
from benchmarks.workloads import Data, Rows, Workload, expect

__all__ = ["BLOCK_STEPS", "SEED", "Store"]

SEED = 3
BLOCK_STEPS = 100
_TOLERATED = 0.1  # by which part frequencies may be off, beyond chance


class Store:
    """A workload's trajectories as flat arrays and as a table; W1 has a priority for each.

    Attributes:
        data, source: the same values. table: the same again, private.
        leaves: float64 [trajectories], the priorities to the power of alpha.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload, self.data = workload, Data(workload)
        self.source = Source(self.spec)
        stacked = self.data.stacked
        for part, columns in self.source.chunks():
            for name, values in columns.items():
                stacked[name][part] = torch.from_numpy(values)
        self.leaves = self.source.priorities.astype(np.float64) ** ALPHA
        lengths = np.full(workload.trajectories, workload.steps)
        self.table = gear.Table.create(
            workload.schema,
            max_steps=workload.trajectories * workload.steps,
            max_trajectories=workload.trajectories,
            block_steps=BLOCK_STEPS,
            max_blocks=gear.Table.required_blocks(lengths, BLOCK_STEPS),
        )
        self.table.extend(stacked, lengths=lengths, priority=self.source.priorities)

    @property
    def prioritized(self) -> bool:
        """Whether its batches are drawn by priority."""
        return self.workload.anchor == "first"

    @property
    def spec(self) -> dict[str, Any]:
        """What peers are told about it."""
        workload = self.workload
        return {
            "columns": {name: list(shape) for name, shape in workload.columns},
            "steps": workload.steps,
            "trajectories": workload.trajectories,
            "window": workload.window.length,
            "seed": SEED,
        }

    def close(self) -> None:
        """Give back the table."""
        self.table.close()

    # ---------------------------------------------------------------- checks

    def verify(self, found: Mapping[str, Any], batch: int) -> np.ndarray:
        """Compare a batch with what is stored; int64 [batch]: the trajectory of each row.

        Raises:
            Incorrect: a row is none that is stored, or there are not as many.
        """
        workload, mark = self.workload, found[self.source.mark].cpu()
        if list(mark.shape) != [batch, workload.window.length]:
            raise Incorrect(f"{self.source.mark} has shape {list(mark.shape)}; {batch} rows were expected")
        last = mark[:, -1]
        if not bool(((last >= 0) & (last < workload.trajectories * workload.steps)).all()):
            raise Incorrect("a row ends with what numbers no step")
        positions, steps = last.long() // workload.steps, last.long() % workload.steps
        anchors = torch.zeros_like(steps) if workload.anchor == "first" else steps
        expected = self.data.expected(Rows(positions, anchors))
        expect(found, {name: values for name, values in expected.items() if name in found or name != "mask"})
        return positions.numpy()

    def check_draws(
        self, positions: np.ndarray, weights: Sequence[np.ndarray] | None, *, prioritized: bool
    ) -> None:
        """Compare what was drawn with what should be, and importance weights with the priorities.

        Args:
            positions: int64 [batches, batch], trajectories.
            weights: float [batch] of each batch, if there are any; each batch may have a scale of its own.

        Raises:
            Incorrect: frequencies or weights differ.
        """
        count = self.workload.trajectories
        leaves = self.leaves if prioritized else np.ones(count)
        bins = {
            "priorities": np.minimum((self.source.priorities * 16).astype(np.int64), 15),
            "positions": np.arange(count) * 16 // count,
        }
        for what, places in bins.items():
            share = np.bincount(places, weights=leaves, minlength=16) / leaves.sum()
            found = np.bincount(places[positions.ravel()], minlength=16)
            expected = share * found.sum()
            off = np.abs(found - expected) - 5 * np.sqrt(expected)
            if (off > _TOLERATED * expected).any():
                worst = int(np.argmax(off / np.maximum(expected, 1e-9)))
                raise Incorrect(
                    f"{what}: {found[worst]} draws of {found.sum()} are in bin {worst}, {expected[worst]:.0f} expected"
                )
        if not prioritized:
            return
        if weights is None:
            raise Incorrect("there are no importance weights")
        for row, each in zip(positions, weights, strict=True):
            scale = each * self.leaves[row] ** BETA
            if not np.allclose(scale, scale[0], rtol=1e-3):
                raise Incorrect("the importance weights differ from what the priorities say")

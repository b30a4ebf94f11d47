"""`Refresh`: the options of tables that cannot hold their data set at once."""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np
import torch

from gear_loader.errors import SourceError
from gear_loader.selection.samplers import Prioritized
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least


@dataclasses.dataclass(frozen=True)
class Refresh:
    """How `load` goes on fetching what a table cannot hold at once: ``refresh=gear.sources.Refresh(epochs=10)``.

    The table is a shuffle buffer. In each epoch, a pass over the source, every episode is fetched once, in an order of
    its own; it takes the place of the oldest one in a table that evicts the oldest, so that each is in the table for as
    many fetches. Where the format gives access to each episode the order is random; in formats of files and row groups
    these are in random order, and what is in one is read in its order.

    With a `sampler` each episode that is fetched is drawn in proportion to ``(priority + eps) ** alpha``, out of all of
    them, whether they are in the table or not. Draws from the table stay uniform: what is drawn from it is then in
    proportion to these powers, too. A priority is that of the whole episode. It is kept when the episode leaves:
    the last one set by ``table.update_priority``, or by ``table.loading.update_priority``, which also knows episodes
    that have left. One that was never fetched has the largest priority so far, at least 1.

    Attributes:
        epochs: passes over the source, or as many fetches; None: until the table is closed, or `Table.loading`
            cancelled.
        samples_per_insert: rows drawn from the table, by all its readers, for each episode that is fetched once the
            table is full; the fetch waits for them, while draws do not wait for the fetch (the table's rate limiter
            can make them). None: the mean number of steps of an episode, so that an epoch takes as many rows as the
            source has steps; a table that waits for room (``on_full="wait"``, with `Limits`) fetches as there is some.
        seed: of the orders; the same for all ranks.
        sampler: `gear_loader.Prioritized`, with `alpha`, `beta` and `eps` alone; None: passes.
        number: with a sampler, the column of the table, ``Column(torch.int64, per="trajectory")``, that gets the number
            of the episode in the source, by which it is known again. A table made by `load` has it.
        weight: with a sampler, the column of the table, ``Column(torch.float32, per="trajectory")``, that gets the
            importance weight ``(N * P(i)) ** -beta``, where P(i) was the probability of fetching the episode; it is not
            divided by the largest one. None: no column.
        record: with a sampler, the path of a file that keeps the priorities of all episodes, float32 in the format of
            `numpy.save`, NaN for those never fetched; it is up to date when the process is killed. A file for each
            rank. None: `resume` knows the priorities of the episodes in the table alone.

    Raises:
        SourceError: an invalid value.
    """

    epochs: int | None = None
    samples_per_insert: float | None = None
    seed: int = 0
    sampler: Prioritized | None = None
    number: str = "source_episode"
    weight: str | None = "source_weight"
    record: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None:
            at_least("epochs", self.epochs, otherwise=", or None", error=SourceError)
        rows = self.samples_per_insert
        plain = isinstance(rows, (int, float, np.number)) and not isinstance(rows, bool)
        if rows is not None and not (plain and 0 < rows < math.inf):
            raise SourceError(
                f"samples_per_insert is {shown(rows)}; expected the rows to be drawn for each episode that is fetched, "
                "a finite number above 0, or None."
            )
        at_least("seed", self.seed, least=0, error=SourceError)
        self._check_sampler()

    def _check_sampler(self) -> None:
        sampler = self.sampler
        if sampler is None:
            if self.record is not None:
                raise SourceError("record= was given without sampler=; expected gear.Prioritized(alpha=).")
            return
        if not isinstance(sampler, Prioritized):
            raise SourceError(f"sampler is {shown(sampler)}; expected gear.Prioritized(alpha=), or None.")
        plain = sampler.replacement and sampler.unit == "trajectory" and sampler.normalize == "batch"
        if not plain or sampler.freshness != 1.0:
            raise SourceError(
                f"sampler is {sampler!r}; expected Prioritized with alpha, beta and eps alone: whole episodes are "
                "fetched, one after another."
            )
        if not isinstance(self.number, str) or not (self.weight is None or isinstance(self.weight, str)):
            raise SourceError(
                f"number is {shown(self.number)} and weight {shown(self.weight)}; expected names of columns."
            )
        if self.number == self.weight:
            raise SourceError(f"number and weight are both {self.number!r}; expected two names.")
        if self.record is not None and not isinstance(self.record, (str, os.PathLike)):
            raise SourceError(f"record is {shown(self.record)}; expected the path of a file, or None.")

    @property
    def own_columns(self) -> dict[str, Column]:
        """The columns that fetched episodes get beside those of the source."""
        if self.sampler is None:
            return {}
        columns = {self.number: Column(torch.int64, per="trajectory")}
        if self.weight is not None:
            columns[self.weight] = Column(torch.float32, per="trajectory")
        return columns

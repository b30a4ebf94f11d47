"""Data sets in tables of this project, by `load_dataset`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

import gear_loader as gear
from benchmarks.peers import data

PACKAGES = MODULES = ("torch", "numpy")


class Ours(data.Subject):
    """A table of the data set that there is, named where several processes read it; batches of single steps."""

    options: Mapping[str, Any] = MappingProxyType({})
    name: str | None = None
    attached = False
    whole = True

    def join(self, rank: int, world: int) -> None:
        about = f"{self.data.count}-{self.place.name}-{os.getppid()}"
        self.name, self.attached = f"bench-data-{about}", rank > 0

    def open(self, batch: int, workers: int, passes: int) -> None:
        """Batches that this process draws; it decodes in as many threads as torch uses."""
        if self.attached:
            self.store = gear.Table.attach(str(self.name))
        else:
            self.store = self.load()
        sampler = gear.Uniform(unit="step", replacement=not self.whole)
        windows = {
            name: gear.Window(1, squeeze=True)
            for name, column in self.store.schema.items()
            if not column.trajectory
        }
        self.rows_of = gear.ReplayDataset(
            self.store,
            batch_size=batch,
            windows=windows,
            sampler=sampler,
            seed=data.SEED,
            batches_per_epoch=passes,
            device="cpu",
        )

    def load(self) -> gear.Table:
        own, kind = {**self.options, "name": self.name, "progress": False}, self.data.kind
        if kind == "robot":
            own["columns"] = {"number": "index", **data.COLUMNS, **data.CAMERAS}
            if self.data.address:
                return gear.load_dataset(f"parquet:{self.data.address}/made/*.parquet", **own)
            own["columns"]["task"] = "task"
            return gear.load_dataset(f"lerobot:{self.data.made}", **own)
        if kind == "texts":
            return gear.load_dataset(f"hf:{self.data.made}", episode="number", **own)
        if self.data.made.with_suffix(".hdf5").exists():
            return gear.load_dataset(str(self.data.made.with_suffix(".hdf5")), **own)
        return gear.load_dataset(f"parquet:{self.data.made}", **own)

    def batches(self) -> Iterator[Any]:
        return iter(self.rows_of)

    def rows(self, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
        if self.data.kind == "texts":
            found = {name: [str(one) for one in batch[name]] for name in ("prompt", "answer")}
            return batch["reward"].numpy().astype(np.int64), found
        if self.data.kind == "numbers":
            names = {"observations": "observation", "actions": "action"}
            numbers = batch["reward"].numpy().astype(np.int64)
            return numbers, {own: batch[name].numpy() for own, name in names.items()}
        names = (*data.COLUMNS, *data.CAMERAS)
        return batch["number"].numpy(), {name: batch[name].numpy() for name in names}

    def close(self) -> None:
        if self.store is not None:
            self.rows_of = None
            self.store.close()
            if self.name is not None and not self.attached:
                self.store.unlink()
        super().close()


class Decoded(Ours):
    """Images and video are decoded once, when they are loaded."""

    options = MappingProxyType({"decode": True})


class Background(Ours):
    """A table that is filled while it is drawn from: draws are of what is there, with replacement."""

    options, whole = MappingProxyType({"wait": False}), False

    def load(self) -> gear.Table:
        table = super().load()
        while not len(table) and not table.loading.done:
            time.sleep(0.001)
        return table


KINDS: dict[str, dict[str, Any]] = {
    "data": {"ours": Ours, "ours, decoded": Decoded, "ours, in the background": Background}
}

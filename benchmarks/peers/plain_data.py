"""Data sets of numbers and texts as h5py, Arrow and Hugging Face write them; and what reads them with these alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers import data

PACKAGES = MODULES = ("torch", "numpy")
ROWS = 20_000
"""Of a row group."""


def fixed(values: np.ndarray) -> Any:
    """A column of Arrow of lists of one length."""
    import pyarrow

    flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1))
    return pyarrow.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))


class HDF5(data.Subject):
    """Writes a file as D4RL has it, by h5py."""

    def fill(self) -> None:
        import h5py

        ends = np.zeros(self.data.count, dtype=bool)
        ends[np.cumsum(self.data.lengths) - 1] = True
        with h5py.File(self.data.made.with_suffix(".hdf5"), "w") as file:
            for name, values in self.data.arrays.items():
                file[name] = values
            file["rewards"] = np.arange(self.data.count, dtype=np.float32)
            file["terminals"], file["timeouts"] = np.zeros_like(ends), ends


class Parquet(data.Subject):
    """Writes a file of steps, by pyarrow."""

    def fill(self) -> None:
        import pyarrow
        from pyarrow import parquet

        numbers = np.repeat(np.arange(len(self.data.lengths)), self.data.lengths)
        columns: dict[str, Any] = {"episode_index": numbers}
        for name, own in (("observations", "observation"), ("actions", "action")):
            columns[own] = fixed(self.data.arrays[name])
        columns["reward"] = np.arange(self.data.count, dtype=np.float32)
        self.data.made.mkdir()
        parquet.write_table(pyarrow.table(columns), self.data.made / "0.parquet", row_group_size=ROWS)


class Texts(data.Subject):
    """Writes a data set of Hugging Face, by its `save_to_disk`."""

    def fill(self) -> None:
        import datasets

        prompts, answers = zip(*self.data.texts(), strict=True)
        numbers = np.arange(self.data.count)
        columns = {"number": numbers, "prompt": prompts, "answer": answers}
        made = datasets.Dataset.from_dict({**columns, "reward": numbers.astype(np.float32)})
        made.save_to_disk(str(self.data.made))


class Frames(data.Subject):
    """Writes Parquet files with encoded images, by the package datasets, as LeRobot does."""

    FILES = 8

    def fill(self) -> None:
        import datasets
        from PIL import Image

        images = {own: datasets.Image() for own in data.CAMERAS.values()}
        episodes = list(self.data.episodes())
        self.data.made.mkdir()
        for file in range(self.FILES):
            rows: list[dict[str, Any]] = []
            for episode in range(
                file * len(episodes) // self.FILES, (file + 1) * len(episodes) // self.FILES
            ):
                for step in range(*episodes[episode]):
                    row: dict[str, Any] = {"episode_index": episode, "index": step}
                    row |= {own: self.data.arrays[name][step] for name, own in data.COLUMNS.items()}
                    row |= {
                        own: Image.fromarray(self.data.arrays[name][step])
                        for name, own in data.CAMERAS.items()
                    }
                    rows.append(row)
            if rows:
                features = {"episode_index": datasets.Value("int64"), "index": datasets.Value("int64")}
                for name, own in data.COLUMNS.items():
                    size = self.data.arrays[name].shape[1]
                    features[own] = datasets.Sequence(datasets.Value("float32"), length=size)
                made = datasets.Dataset.from_list(rows, features=datasets.Features({**features, **images}))
                made.to_parquet(str(self.data.made / f"{file}.parquet"))


class Memory(data.Loaded):
    """All arrays of a file in this process, as tensors; `DataLoader` picks rows and stacks them."""

    def open(self, batch: int, workers: int, passes: int) -> None:
        import h5py
        import torch
        from torch.utils.data import BatchSampler, DataLoader, RandomSampler

        with h5py.File(self.data.made.with_suffix(".hdf5")) as file:
            names = ("observations", "actions", "rewards")
            held = {name: torch.from_numpy(file[name][...]) for name in names}

        class Steps:
            def __len__(self) -> int:
                return len(held["rewards"])

            def __getitem__(self, places: list[int]) -> dict[str, Any]:
                return {name: values[places] for name, values in held.items()}

        order = BatchSampler(RandomSampler(Steps(), num_samples=passes * batch), batch, drop_last=False)
        given: dict[str, Any] = {"persistent_workers": True} if workers else {}
        self.store = DataLoader(Steps(), batch_size=None, sampler=order, num_workers=workers, **given)

    def rows(self, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
        values = {name: batch[name].numpy() for name in ("observations", "actions")}
        return batch["rewards"].numpy().astype(np.int64), values


class HuggingFace(data.Loaded):
    """A data set in torch's format; `DataLoader` asks it for a batch at a time, as its documentation has it."""

    def fill(self) -> None:
        if self.data.made.with_suffix(
            ".hdf5"
        ).exists():  # which the package does not read: Parquet in place of it
            import pyarrow
            from pyarrow import parquet

            columns = {
                "observation": fixed(self.data.arrays["observations"]),
                "action": fixed(self.data.arrays["actions"]),
                "reward": np.arange(self.data.count, dtype=np.float32),
            }
            self.place.mkdir()
            parquet.write_table(pyarrow.table(columns), self.place / "0.parquet", row_group_size=ROWS)

    def open(self, batch: int, workers: int, passes: int) -> None:
        import datasets
        from torch.utils.data import BatchSampler, DataLoader, RandomSampler

        datasets.disable_progress_bars()
        if self.data.kind == "texts":
            found = datasets.load_from_disk(str(self.data.made))
        else:
            folder = self.place if self.place.is_dir() else self.data.made
            folder = folder / "data" if (folder / "data").is_dir() else folder
            files = sorted(map(str, folder.rglob("*.parquet")))
            found = datasets.Dataset.from_parquet(files, cache_dir=str(self.cache))
        found = found.with_format("torch")
        order = BatchSampler(RandomSampler(found, num_samples=passes * batch), batch, drop_last=False)
        given: dict[str, Any] = {"persistent_workers": True} if workers else {}
        self.store = DataLoader(found, batch_size=None, sampler=order, num_workers=workers, **given)

    def rows(self, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
        if self.data.kind == "texts":
            values: dict[str, Any] = {name: batch[name] for name in ("prompt", "answer")}
            return batch["reward"].numpy().astype(np.int64), values
        if self.data.kind == "numbers":
            names = {"observations": "observation", "actions": "action"}
            values = {own: batch[name].numpy() for own, name in names.items()}
            return batch["reward"].numpy().astype(np.int64), values
        values = {own: batch[name].numpy() for own, name in data.COLUMNS.items()}
        for own, name in data.CAMERAS.items():
            values[own] = batch[name].movedim(1, -1).numpy()
        return batch["index"].numpy(), values


KINDS: dict[str, dict[str, Any]] = {
    "data": {
        "hdf5": HDF5,
        "parquet": Parquet,
        "texts": Texts,
        "frames": Frames,
        "DataLoader, in memory": Memory,
        "Hugging Face": HuggingFace,
    }
}

"""MosaicML Streaming: shards in its format MDS, on this machine or in a bucket."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from benchmarks.peers import data

PACKAGES = ("mosaicml-streaming", "torch", "numpy")
MODULES = ("torch", "PIL.Image", "streaming")
SHARD_BYTES = 1 << 22


class Samples(data.Loaded):
    """Samples, images as png, shuffled as by default; from a bucket they are fetched into a folder of this machine."""

    together = True

    def fill(self) -> None:
        from PIL import Image
        from streaming import MDSWriter

        arrays, columns = self.data.arrays, {"number": "int"}
        texts = self.data.texts() if self.data.kind == "texts" else []
        columns |= dict.fromkeys(("prompt", "answer"), "str") if texts else {}
        for name, values in arrays.items():
            columns[name] = "png" if name in data.CAMERAS else f"ndarray:float32:{values.shape[1]}"
        with MDSWriter(out=str(self.place), columns=columns, size_limit=SHARD_BYTES) as writer:
            for number in range(self.data.count):
                sample: dict[str, Any] = {"number": number}
                if texts:
                    sample["prompt"], sample["answer"] = texts[number]
                for name, values in arrays.items():
                    one = np.ascontiguousarray(values[number])
                    sample[name] = Image.fromarray(one) if name in data.CAMERAS else one
                writer.write(sample)

    def join(self, rank: int, world: int) -> None:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {name: str(value) for name, value in told.items()}

    def open(self, batch: int, workers: int, passes: int) -> None:
        import streaming
        from torch.utils.data import DataLoader

        class Rows(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
            def __getitem__(self, at: Any) -> Any:
                found = super().__getitem__(at)
                return {name: _array(each) for name, each in found.items()}

        world = int(os.environ.get("WORLD_SIZE", "1"))
        where: dict[str, Any] = {"local": str(self.place)}
        if self.data.address:
            where = {"local": str(self.cache), "remote": f"{self.data.address}/streaming"}
        size = passes * batch * world
        rows = Rows(**where, batch_size=batch, shuffle=True, epoch_size=size, shuffle_seed=data.SEED)
        given: dict[str, Any] = {"persistent_workers": True} if workers else {}
        self.store = DataLoader(rows, batch_size=batch, num_workers=workers, **given)

    def rows(self, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
        values = {name: each if isinstance(each, list) else each.numpy() for name, each in batch.items()}
        return values.pop("number"), values

    def close(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            import streaming

            del store
            super().close()
            streaming.base.util.clean_stale_shared_memory()
        super().close()


def _array(value: Any) -> Any:
    return value if isinstance(value, (int, str, np.ndarray)) else np.array(value)


KINDS: dict[str, dict[str, Any]] = {"data": {"MosaicML Streaming": Samples}}

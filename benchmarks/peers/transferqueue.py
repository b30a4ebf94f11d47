"""TransferQueue with its simple storage: a process of Ray that answers over ZeroMQ."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers import sequences, values

PACKAGES = ("TransferQueue", "ray", "tensordict", "torch", "numpy")
MODULES = ("ray", "transfer_queue", "tensordict", "torch")
_PARTITION = "sequences"


class Sequences(sequences.Subject):
    """Columns as jagged fields, read by keys."""

    def fill(self) -> None:
        import ray
        import torch
        import transfer_queue
        from omegaconf import OmegaConf
        from tensordict import TensorDict

        self.store = tempfile.TemporaryDirectory(prefix="gear-ray-", dir="/tmp", ignore_cleanup_errors=True)
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=self.store.name)
        storage = {"total_storage_size": 10 * len(self.lengths), "num_data_storage_units": 1}
        backend = {"storage_backend": "SimpleStorage", "SimpleStorage": storage}
        transfer_queue.init(OmegaConf.create({"backend": backend}))
        numbers = list(range(len(self.lengths)))
        for low in range(0, len(numbers), sequences.CHUNK):
            part = numbers[low : low + sequences.CHUNK]
            fields = {
                f"column{i}": torch.nested.as_nested_tensor(
                    [torch.from_numpy(self.values(i, number)) for number in part], layout=torch.jagged
                )
                for i in range(self.columns)
            }
            keys = [str(number) for number in part]
            transfer_queue.kv_batch_put(keys, _PARTITION, fields=TensorDict(fields, batch_size=[len(part)]))

    def read(self, chosen: list[int]) -> Any:
        import transfer_queue

        return transfer_queue.kv_batch_get([str(number) for number in chosen], _PARTITION)

    def rows(self, batch: Any, column: int) -> list[np.ndarray]:
        return [row.numpy() for row in batch[f"column{column}"].unbind()]

    def close(self) -> None:
        """End the store and Ray."""
        import ray
        import transfer_queue

        transfer_queue.close()
        ray.shutdown()
        self.store.cleanup()
        super().close()


class Tokens(values.Subject):
    """The same from another task's data; a batch is what `kv_batch_get` returns."""

    def fill(self) -> None:
        self.store = Sequences(self.data.columns, self.data.lengths.tolist())
        self.store.fill()

    def open(self, batch: int, window: int, workers: int) -> Iterator[Any]:
        random = np.random.default_rng(values.SEED)
        while True:
            chosen = random.integers(self.data.count, size=batch).tolist()
            yield self.store.read(chosen), chosen

    def rows(self, batch: Any) -> Iterator[tuple[int, list[np.ndarray]]]:
        found, chosen = batch
        columns = [self.store.rows(found, column) for column in range(self.data.columns)]
        for number, row in zip(chosen, zip(*columns, strict=True), strict=True):
            yield number, list(row)

    def count(self, batch: Any) -> int:
        return int(self.data.lengths[batch[1]].sum())

    def stored(self) -> int:
        """Memory of its processes is not looked at."""
        return 0

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        super().close()


KINDS: dict[str, dict[str, Any]] = {
    "sequences": {"TransferQueue": Sequences},
    "values": {"TransferQueue": Tokens},
}

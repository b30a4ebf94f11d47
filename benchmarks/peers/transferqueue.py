"""TransferQueue with its simple storage: a process of Ray that answers over ZeroMQ."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np

from benchmarks.peers import sequences

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


KINDS: dict[str, dict[str, Any]] = {"sequences": {"TransferQueue": Sequences}}

"""Reading the table of a server: what `RemoteTable` has beside adding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.storage.schema import Schema
from gear_loader.storage.table_rules import Rules
from gear_loader.transport.client import Peer
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import new_mutex
from gear_loader.utils.provided import provided

if TYPE_CHECKING:
    import torch


class RemoteReads:
    """Reads rows of a table of a server.

    Args:
        peer: the server. name: of the table. timeout: seconds that a call waits for it.

    Attributes:
        peer, name, timeout: as given. rules: none; the server keeps those of its table.
    """

    rules = Rules()
    schema: Schema

    def __init__(self, peer: Peer, name: str, timeout: float) -> None:
        self.peer, self.name, self.timeout = peer, name, timeout
        self._sampled: Any = None  # the datasets of `sample`
        self._rows_guard = new_mutex()
        self._rows_link: Any = None

    @staticmethod
    def dataset_class() -> Any:
        """The class of a `ReplayDataset` over it."""
        return provided("RemoteDataset")

    def origin(self, ranks: Any) -> Any:
        """What it hands to such a dataset."""
        return provided("RemoteOrigin")(self, ranks)

    def sample(
        self,
        batch_size: int,
        *,
        windows: Any = None,
        seed: int = 0,
        device: str | torch.device = "auto",
    ) -> dict[str, Any]:
        """Draw one batch, as `Table.sample`: the server draws it, the same one as a process of its machine would.

        Raises:
            As `Table.sample`. PeerTimeoutError: no answer before the deadline. TransportError: the server's clients may
            only write, ``allow="write"``, as by default.
        """
        options = {"windows": windows, "seed": seed, "device": device}
        if self._sampled is None:
            self._sampled = provided("Sampled")()
        batch: dict[str, Any] = provided("sample")(self, batch_size, options, self._sampled)
        return batch

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A copy of one trajectory; see `Table.__getitem__`, and `sample` for the errors of the network."""
        return dict(self._ask("item", {"index": int(index)}))

    def final(self, index: int) -> dict[str, torch.Tensor] | None:
        """The values after the last step of one trajectory; see `Table.final`."""
        found = self._ask("final", {"index": int(index)})
        return None if found is None else dict(found)

    def gather(
        self,
        index: Sequence[int] | Array | torch.Tensor,
        anchor: Sequence[int] | Array | torch.Tensor | None = None,
        *,
        windows: Any = None,
    ) -> dict[str, Any]:
        """Copy rows that the caller chose; see `Table.gather`. Batches are new memory on the CPU."""
        packed = provided("options_to_json")({"windows": windows})["windows"]
        rows = {"index": np.asarray(index)} | ({} if anchor is None else {"anchor": np.asarray(anchor)})
        batch: dict[str, Any] = self._ask("gather", {"windows": packed}, rows)
        return batch

    def indices(self) -> Array:
        """Indices of all live trajectories, oldest first, int64 [n]."""
        found: Array = self._ask("rows", {})["indices"].numpy()
        return found

    def lengths(self) -> Array:
        """Lengths of all live trajectories in steps, oldest first, int64 [n]."""
        found: Array = self._ask("rows", {})["lengths"].numpy()
        return found

    def _ask(self, name: str, options: dict[str, Any], values: Any = None) -> Any:
        with self._rows_guard:
            if self._rows_link is None:
                self._rows_link = provided("LearnerLink")(self.peer, self.name, None, self.timeout)
            return self._rows_link.call(name, options, values)

    def _end_reading(self) -> None:
        """End the connections of rows and of `sample`."""
        link, self._rows_link = self._rows_link, None
        if link is not None:
            link.close()
        kept, self._sampled = self._sampled, None
        for _, dataset in [] if kept is None else kept.datasets:
            dataset.close()

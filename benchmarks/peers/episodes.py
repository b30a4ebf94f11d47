"""The episodes that `train` trains on, what delivers batches of them, and what these are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.peers import source

WINDOW = 20
"""Steps that the model looks back on."""
COLUMNS = ("observation", "action", "return_to_go", "step")


class Data:
    """Episodes one after another, from a file.

    columns: name -> float32 ``[steps, ...]``; ``step`` is a step's number in its episode. lengths: int64, of the
    episodes. horizon: steps that an episode has at most. scale: what returns are divided by.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with np.load(path) as file:
            self.columns = {name: file[name] for name in COLUMNS}
            self.lengths = file["lengths"]
            self.horizon, self.scale = float(file["horizon"]), float(file["scale"])
        self.begins = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])


def verify(batch: Mapping[str, Any], data: Data) -> np.ndarray:
    """Compare a batch with the data, byte for byte.

    A row holds successive steps of one episode, then padding: zeros where the mask is False. It is shorter than the
    window only at the begin of an episode. Returns: The first step of each row, int64 [B], counted over all episodes.
    """
    found = {name: batch[name].cpu().numpy() for name in COLUMNS}
    mask = batch["mask"].cpu().numpy()
    lengths = mask.sum(1)
    if mask.shape[1] != WINDOW or not np.array_equal(mask, np.arange(WINDOW) < lengths[:, None]):
        raise ValueError("steps that exist are not the first ones of the rows")
    places = {row.tobytes(): i for i, row in enumerate(data.columns["observation"])}
    firsts = np.array([places.get(row[0].tobytes(), -1) for row in found["observation"]])
    if (firsts < 0).any():
        raise ValueError(f"row {int(firsts.argmin())} begins with a step that is not in the data")
    steps = firsts[:, None] + np.arange(WINDOW)
    episode = np.searchsorted(data.begins, firsts, side="right") - 1
    ends = data.begins[episode] + data.lengths[episode]
    if (firsts + lengths > ends).any():
        raise ValueError("a row goes on beyond the end of its episode")
    if ((lengths < WINDOW) & (firsts != data.begins[episode])).any():
        raise ValueError("a row is short although its episode began earlier")
    for name, values in data.columns.items():
        expected = values[np.minimum(steps, len(values) - 1)]
        expected[~mask] = 0
        if found[name].dtype != expected.dtype or found[name].tobytes() != expected.tobytes():
            raise ValueError(f"{name} differs from the data")
    return firsts


class Loader(source.Subject):
    """`open` makes it; `next` gives a batch: name -> ``[batch, WINDOW, ...]`` of `COLUMNS`, and their mask.

    ahead: batches that it may have ready before they are asked for. varied: whether its batches differ.
    """

    ahead = 0
    varied = True
    open: Callable[[], None]
    next: Callable[[], Mapping[str, Any]]

    def __init__(self, data: Data, batch: int, seed: int, device: Any) -> None:
        self.data, self.batch, self.seed, self.device = data, batch, seed, device
        self.open()

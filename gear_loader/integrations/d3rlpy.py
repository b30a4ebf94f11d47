"""Episodes of d3rlpy, into a `gear_loader.Table` and out of it.

::

    table.extend(list(from_episodes(dataset.episodes)))
    buffer = d3rlpy.dataset.create_infinite_replay_buffer(to_episodes(table, d3rlpy.dataset.Episode))

d3rlpy is not imported: an episode is any object with its fields ``observations`` ``[T, *shape]``, ``actions``
``[T, *shape]``, ``rewards`` ``[T, 1]`` and ``terminated``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.integrations.exported_columns import exported_columns, numbers
from gear_loader.sources import Episode
from gear_loader.sources.episodes import Columns
from gear_loader.storage.table import Table

__all__ = ["from_episodes", "to_episodes"]

_FIELDS = ("observations", "actions", "rewards", "terminated")
_COLUMNS = ("observation", "action", "reward", "terminated")


def from_episodes(episodes: Iterable[Any]) -> Iterator[Episode]:
    """Convert d3rlpy's episodes to those of `gear_loader.sources`, which `Table.extend` and `sources.load` take.

    Args:
        episodes: objects with the four fields. Observations may be a tuple of arrays.

    Returns:
        Episodes with the columns ``observation`` (of a tuple ``observation.0`` and so on), ``action``, ``reward``
        ``[T]``, ``terminated`` and ``truncated``: the last step of an episode that has not terminated.

    Raises:
        SourceError: an object without these fields, or arrays of different lengths; during iteration.
    """
    for number, episode in enumerate(episodes):
        missing = [field for field in _FIELDS if not hasattr(episode, field)]
        if missing:
            raise SourceError(
                f"Episode {number} is a {type(episode).__name__} without {missing}; expected one of d3rlpy, with the "
                f"fields {list(_FIELDS)}."
            )
        observations = episode.observations
        parts = (
            {f"observation.{place}": np.asarray(part) for place, part in enumerate(observations)}
            if isinstance(observations, (list, tuple))
            else {"observation": np.asarray(observations)}
        )
        rewards = np.asarray(episode.rewards)
        found = {**parts, "action": np.asarray(episode.actions), "reward": rewards.reshape(len(rewards), -1)}
        lengths = {name: len(array) for name, array in found.items()}
        if len(set(lengths.values())) != 1 or not len(rewards) or found["reward"].shape[1] != 1:
            raise SourceError(
                f"Episode {number} has arrays of the lengths {lengths}, and rewards {list(rewards.shape)}; expected "
                "one length T above 0 of all, and rewards [T, 1]."
            )
        found["reward"] = rewards.reshape(-1)
        for name, set_last in (("terminated", episode.terminated), ("truncated", not episode.terminated)):
            found[name] = np.zeros(len(rewards), dtype=bool)
            found[name][-1] = bool(set_last)
        yield Episode(found)


def to_episodes(table: Table, make: Callable[..., Any], *, columns: Columns = None) -> list[Any]:
    """The trajectories of a table as d3rlpy's episodes, the oldest first; the arrays are copies.

    Rewards become float32 ``[T, 1]``; observations and actions that are single numbers, ``[T]``, become ``[T, 1]``;
    other arrays keep dtype and shape. Final steps are left out, because d3rlpy has no field for them.

    Args:
        table: has the columns ``observation`` (or ``obs``, as in a `ReplayBuffer`; ``observation.0`` and so on become a
            tuple), ``action``, ``reward`` and ``terminated``.
        make: makes an episode from the four fields, given by name: ``d3rlpy.dataset.Episode``.
        columns: ``{one of the four: name in the table}``; None takes these names.

    Raises:
        SchemaError: a column is missing.
        StaleIndexError: a trajectory was evicted or removed meanwhile.
    """
    chosen = exported_columns(table, columns, _COLUMNS)
    episodes = []
    for index in table.indices().tolist():
        rows = numbers(table[index], chosen)
        rows = {
            name: values.reshape(len(values), -1) if values.ndim == 1 else values
            for name, values in rows.items()
        }
        parts = [name for name in rows if name.startswith("observation.")]
        episodes.append(
            make(
                observations=tuple(rows[name] for name in parts) if parts else rows["observation"],
                actions=rows["action"],
                rewards=rows["reward"].astype(np.float32),
                terminated=bool(rows["terminated"][-1, 0]),
            )
        )
    return episodes

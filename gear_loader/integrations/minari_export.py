"""Trajectories of a `gear_loader.Table` as a Minari data set; `gear_loader.sources.read_minari` reads one.

::

    dataset = to_minari(table, "cartpole/mine-v0", env="CartPole-v1", author="Me", algorithm_name="DQN")
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.integrations.exported_columns import exported_columns, numbers
from gear_loader.sources.episodes import Columns
from gear_loader.sources.recording import leaves
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.paths import is_address

try:
    import gymnasium
    import minari
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer
except ImportError as error:
    raise ImportError(
        f"gear_loader.integrations.minari_export needs Minari, which cannot be imported ({error}). "
        "Install it: pip install '.[sources]' (in a clone of Gear Loader)",
        name="minari",
    ) from error

__all__ = ["to_minari"]

_FIELDS = ("observation", "action", "reward", "terminated", "truncated", "info")


def to_minari(
    table: Table,
    dataset_id: str,
    *,
    columns: Columns = None,
    env: Any = None,
    observation_space: Any = None,
    action_space: Any = None,
    **options: Any,
) -> Any:
    """Write the trajectories of a table as a new Minari data set, oldest first, one at a time.

    An episode of T steps has T + 1 observations: the last one is the trajectory's final step (``Column(final=True)``),
    or the last ``next_observation``. Images are stored without loss. Without a column ``truncated``, an episode that
    has not terminated counts as truncated at its last step. Infos have T + 1 values too; the last one is that of the
    final step, else NaN, 0 or False.

    Args:
        table: a table with the columns ``observation`` (or ``obs``, as in a `ReplayBuffer`), ``action``, ``reward`` and
            ``terminated``. Nested ones, such as ``observation.camera``, become nested spaces.
        dataset_id: as Minari takes it: ``"cartpole/mine-v0"``. It is stored where Minari stores data sets.
        columns: ``{name in the data set: name in the table}``, or names. None takes the four, ``truncated``,
            ``next_observation`` and ``info``, if the table has them.
        env: the environment, its id or its spec. The spaces are taken from it, and Minari stores it with the data set.
        observation_space, action_space: the environment's spaces. None takes those of `env`; without `env`, unbounded
            Boxes of the columns' dtypes.
        options: of `minari.create_dataset_from_buffers`: ``author``, ``algorithm_name``, ``data_format`` and more.

    Returns:
        The `minari.MinariDataset`.

    Raises:
        SchemaError: a column is missing, a trajectory has no final step, or the columns do not fit the spaces. No data
            set was written.
        StaleIndexError: a trajectory was evicted or removed meanwhile. No data set was written.
        ValueError: Minari refuses an option, or the data set exists.
    """
    if is_address(dataset_id):
        raise SchemaError(
            f"{dataset_id} was received; expected the id of a data set: Minari stores it on this machine. Copy the "
            "directory of the data set, its storage.data_path, to the address afterwards. Nothing was written."
        )
    chosen = exported_columns(
        table,
        columns,
        ("observation", "action", "reward", "terminated"),
        ("truncated", "next_observation", "info"),
    )
    following = {
        role.removeprefix("next_"): name for role, name in chosen.items() if role.startswith("next_")
    }
    chosen = {role: name for role, name in chosen.items() if not role.startswith("next_")}
    schema = {role: table.schema[name] for role, name in chosen.items()}
    unknown = [role for role in schema if role.partition(".")[0] not in _FIELDS]
    if unknown:
        raise SchemaError(
            f"columns names {unknown}; expected names of {list(_FIELDS)}, nested ones as 'info.x'."
        )
    ends = [role for role in schema if _is_of(role, "observation")]
    if not all(schema[role].final or role in following for role in ends):
        raise SchemaError(
            f"The observations {ends} of the table have no values after the last step, which Minari stores; expected "
            "Column(final=True), or a column next_observation."
        )
    unread = [
        role for role in schema if _is_of(role, "info") and (not schema[role].shape or role.count(".") > 1)
    ]
    if unread and options.get("data_format") in ("arrow", "parquet"):
        raise SchemaError(
            f"The columns {unread} are numbers or nested, which Minari cannot read back from infos in "
            f"{options['data_format']} format; expected data_format='hdf5', or columns such as info.x of shape (1,)."
        )
    made: Any = None
    if env is not None and (observation_space is None or action_space is None):
        made = env if isinstance(env, gymnasium.Env) else gymnasium.make(env)
    found = {"observation": observation_space, "action": action_space}
    for field, space in found.items():
        if space is None:
            found[field] = getattr(made, f"{field}_space") if made is not None else _inferred(schema, field)
        _check_space(found[field], field, schema)
    if made is not None and made is not env:
        made.close()
    started: list[bool] = []

    def episodes() -> Iterator[Any]:
        started.append(True)
        for index in table.indices().tolist():
            yield _episode(table, index, chosen, following, found)

    try:
        return minari.create_dataset_from_buffers(
            dataset_id,
            episodes(),
            env=env,
            observation_space=found["observation"],
            action_space=found["action"],
            **{"jpeg_encoding": False, **options},
        )
    except BaseException:
        if started:  # else it is another one, of the same name
            with contextlib.suppress(OSError):
                shutil.rmtree(minari.storage.get_dataset_path(dataset_id))
        raise


def _episode(
    table: Table,
    index: int,
    chosen: Mapping[str, str],
    following: Mapping[str, str],
    found: Mapping[str, Any],
) -> Any:
    steps, final = table._engine.rows_and_final(index)
    values, after = numbers(steps, chosen), numbers(final, chosen)
    for role, name in following.items():
        if role not in after:
            after[role] = numbers(steps, {role: name})[role][-1]
    if missing := [role for role in chosen if role not in values]:
        raise SchemaError(
            f"Trajectory {index} has no values of the write-once columns {missing}; fill them. No data set was written."
        )
    for role in values:
        if _is_of(role, "observation") and role not in after:
            raise SchemaError(
                f"Trajectory {index} was added without its final step, {role!r}; expected one of each, as Minari "
                "stores the observation after the last action. No data set was written."
            )
        if _is_of(role, "info"):
            last = after.get(role, np.nan if values[role].dtype.kind == "f" else 0)
            after[role] = np.full(values[role].shape[1:], last, values[role].dtype)
    terminated = values["terminated"].astype(bool)
    cut = np.zeros_like(terminated)
    cut[-1] = not terminated[-1]
    ended = {role: np.concatenate((values[role], after[role][None])) for role in after if role in values}
    infos = {role.partition(".")[2]: ended[role] for role in ended if _is_of(role, "info")}
    return EpisodeBuffer(
        observations=_filled(found["observation"], "observation", ended),
        actions=_filled(found["action"], "action", values),
        rewards=values["reward"],
        terminations=terminated,
        truncations=values["truncated"].astype(bool) if "truncated" in values else cut,
        infos=_nested(infos, dict, None) if infos else None,
    )


def _is_of(role: str, field: str) -> bool:
    return role.partition(".")[0] == field


def _filled(space: Any, name: str, values: Mapping[str, Array]) -> Any:
    """Values ``[T, *shape]`` nested as the space is, of its dtypes."""
    if isinstance(space, spaces.Dict):
        return {key: _filled(part, f"{name}.{key}", values) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_filled(part, f"{name}.{place}", values) for place, part in enumerate(space.spaces))
    return values[name].astype(space.dtype, copy=False)


def _nested(values: Mapping[str, Any], make_dict: Any, make_tuple: Any) -> Any:
    """Values by dotted names, nested; tuples, if there is what makes them, where names are places."""
    if "" in values:
        return values[""]
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        parts.setdefault(head, {})[rest] = value
    built = {head: _nested(part, make_dict, make_tuple) for head, part in parts.items()}
    places = list(map(str, range(len(built))))
    if make_tuple is not None and set(built) == set(places):
        return make_tuple([built[place] for place in places])
    return make_dict(built)


def _inferred(schema: Mapping[str, Column], field: str) -> Any:
    """The space of the columns of a field."""

    def box(column: Column) -> Any:
        dtype = _dtype(column)
        low, high = (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)
        if dtype.kind in "iu":
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return spaces.Box(low, high, column.shape, dtype)

    boxes = {role.partition(".")[2]: box(column) for role, column in schema.items() if _is_of(role, field)}
    return _nested(boxes, spaces.Dict, spaces.Tuple)


def _check_space(space: Any, field: str, schema: Mapping[str, Column]) -> None:
    """Raise SchemaError unless the columns of a field hold values of the space."""
    found = leaves(space, field)
    columns = {role: column for role, column in schema.items() if _is_of(role, field)}
    if set(found) != set(columns):
        raise SchemaError(
            f"The {field} space {space} has the parts {sorted(found)}; expected the table's {sorted(columns)}."
        )
    for role, leaf in found.items():
        column, dtype, part = columns[role], _dtype(columns[role]), leaf.space
        if leaf.shape != column.shape or not np.can_cast(dtype, part.dtype, "safe"):
            raise SchemaError(
                f"The column {role!r} is {dtype} {list(column.shape)}; the {field} space has {part} there. Expected a "
                "space of this shape, of a dtype that holds these values."
            )


def _dtype(column: Column) -> np.dtype[Any]:
    """As it is exported: bfloat16 as float32."""
    return np.dtype(np.float32) if column.numpy_dtype is None else column.numpy_dtype

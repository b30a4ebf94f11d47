"""`ReplayBuffer`: transitions in, batches out, in the manner of single-line buffers; a table and a dataset below."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.n_step import NStep
from gear_loader.dataset.options import Draws
from gear_loader.dataset.replay_dataset import ReplayDataset
from gear_loader.errors import CheckpointError, SchemaError, TableEmptyError
from gear_loader.replay.nesting import Nesting, as_array
from gear_loader.selection.selectors import Selector, Uniform
from gear_loader.storage.disk import Disk
from gear_loader.storage.dtypes import NUMPY_DTYPES, torch_dtypes
from gear_loader.storage.schema import Column, Schema, Window
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import at_least, check_gamma

_DTYPES = {dtype: torch_dtypes()[name] for name, dtype in NUMPY_DTYPES.items()}
_FIELDS = ("obs", "action")
_OWN = ("obs", "action", "reward", "next_obs", "terminated", "truncated", "discount", "target")
_LONGEST = 1024
"""Steps after which an episode goes on in another trajectory, so that the oldest can be dropped in pieces."""
_SHORTEST, _MORE = 8, 32  # mean length of an episode for which there is room, and episodes beyond
_DESCRIPTION = "buffer.json"


class ReplayBuffer:
    """Holds the newest transitions of one or n environments, and samples batches of them::

        buffer = gear.ReplayBuffer(100_000, n_step=3)
        buffer.add(obs, action, reward, next_obs, terminated, truncated)
        batch = buffer.sample(256)

    Observations and actions are arrays, or dicts and tuples of arrays, as Gymnasium's spaces nest them; batches are
    nested as they are. The columns are inferred from the first `add`, or from the spaces. Each observation is stored
    once: `next_obs` is read from the step that follows, and at the end of an episode from its final step.

    A batch is a dict:

    ================ ==============================================================================
    ``obs``          ``[B, *shape]``
    ``action``       ``[B, *shape]``
    ``reward``       float32 ``[B]``: the sum of at most `n_step` discounted rewards
    ``next_obs``     ``[B, *shape]``: the observation to bootstrap from, after these rewards
    ``discount``     float32 ``[B]``: ``gamma ** k`` for k rewards; 0 where the episode terminates within them. A target
                     is ``reward + discount * value(next_obs)``, also at truncation.
    other columns    that `add` was given
    ================ ==============================================================================

    and ``index``, ``anchor``, ``generation``, which identify its rows, and ``priority_weight``, as of `ReplayDataset`.
    All transitions are drawn, but the newest of an episode only when the next one has been added, which has its
    `next_obs`. A full buffer drops its oldest trajectory, which is an episode or a piece of at most 1,024 steps of one;
    so it holds nearly `capacity` transitions.

    Args:
        capacity: most transitions of all environments together.
        n_step: most rewards of a return. gamma: discount of a step.
        sampler: how rows are drawn, by default ``Uniform(unit="step")``: for example
            ``Prioritized(alpha=0.6, beta=0.4, unit="step")``.
        batch_size: rows of a batch where `sample` is not told, and of iteration.
        num_envs: number of environments n; by default that of the first `add`, whose rewards are a number or ``[n]``.
        observation_space, action_space: of one environment (Gymnasium); then `table` and `dataset` exist at once.
        device: of batches: ``"auto"``, or a torch device.
        name: of the table, by which other processes attach to it; None for private memory.
        disk: a `Disk`, or a directory: the table is written there in the background; see `Table.create`.
        seed: of all draws.

    Attributes:
        table: the `Table`. dataset: the `ReplayDataset`. Both are None before the columns are known.

    Raises:
        SchemaError: an invalid option.
    """

    table: Table | None = None
    dataset: ReplayDataset | None = None
    _taken: tuple[str, ...] = _OWN
    """Names that columns cannot have."""
    overlap = 0
    """Steps that the pieces of an episode have in common."""

    def __init__(
        self,
        capacity: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        sampler: Selector | None = None,
        batch_size: int = 256,
        num_envs: int | None = None,
        observation_space: Any = None,
        action_space: Any = None,
        device: str | torch.device = "auto",
        name: str | None = None,
        disk: Disk | str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.capacity, self.n_step = at_least("capacity", capacity), at_least("n_step", n_step)
        check_gamma(gamma)
        if sampler is not None and (not isinstance(sampler, Selector) or sampler.unit != "step"):
            raise SchemaError(
                f"sampler is {shown(sampler)}; expected one of steps, such as gear_loader.Uniform(unit='step') or "
                "gear_loader.Prioritized(unit='step')."
            )
        if (observation_space is None) != (action_space is None):
            raise SchemaError("One of observation_space and action_space was given; expected both, or none.")
        self.gamma = float(gamma)
        self._sampler = Uniform(unit="step") if sampler is None else sampler
        self._batch_size = at_least("batch_size", batch_size)
        self._device, self._name, self._seed = device, name, seed
        self._disk = disk if disk is None or isinstance(disk, Disk) else Disk(disk)
        self.num_envs = None if num_envs is None else at_least("num_envs", num_envs)
        self._nestings: dict[str, Nesting] = {}
        self._waiting: dict[str, Any] | None = None  # a state to load when the columns are known
        if observation_space is not None:
            spaces = {"obs": observation_space, "action": action_space}
            self._nestings = {name: Nesting.of(name, space) for name, space in spaces.items()}
            columns = {}
            for name, nesting in self._nestings.items():
                for column, space in _space_leaves(nesting, spaces[name]):
                    columns[column] = _column(column, space.dtype, space.shape)
            self._make(columns)

    # ---------------------------------------------------------------- the table

    def _make(self, columns: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Create the table of columns without those that every buffer has."""
        finals = set(self._nestings["obs"].columns())
        schema = {
            name: Column(dtype, shape, final=name in finals, cast=True)
            for name, (dtype, shape) in columns.items()
        }
        schema |= {"reward": Column(torch.float32, cast=True), "terminated": Column(torch.bool, cast=True)}
        schema = self._columns(schema)
        envs = self.num_envs or 1
        stored = self.capacity * self._piece // (self._piece - self.overlap)
        steps = max(stored, 2 * envs * (self._piece + 1))
        table = Table.create(
            schema,
            max_steps=steps,
            max_trajectories=steps // min(_SHORTEST, self._piece) + 2 * envs + _MORE,
            block_steps=min(16, self._unit),
            name=self._name,
            on_full="evict_oldest",
            disk=self._disk,
        )
        self._use(table)

    def _columns(self, schema: dict[str, Column]) -> dict[str, Column]:
        """All columns of the table, of those of transitions."""
        return schema

    @property
    def _unit(self) -> int:
        """Steps that are drawn together, of which a block has no more."""
        return self._piece

    @property
    def _piece(self) -> int:
        """Most steps of a trajectory."""
        return max(min(self.capacity // (8 * (self.num_envs or 1)), _LONGEST), 1)

    def _use(self, table: Table) -> None:
        """Draw from this table, and write into it."""
        self.dataset = ReplayDataset(
            table,
            batch_size=self._batch_size,
            windows=self._windows(table),
            selector=self._sampler,
            draws=self._draws(),
            seed=self._seed,
            device=self._device,
            batches_per_epoch=math.inf,
        )
        self.table = table
        self._writer: Any = None
        self._before: dict[str, Array] | None = None  # the last `next_obs`
        self._over: Array = np.zeros(0, dtype=bool)  # whether it ended an episode
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self.dataset.load_state_dict(waiting)

    def _draws(self) -> Draws:
        return Draws(complete=True)

    def _windows(self, table: Table) -> dict[str, Any]:
        """An anchor needs the step that follows it, which the windows named ``next_obs`` read; so it is complete."""
        single = Window(1, squeeze=True)
        windows: dict[str, Any] = {
            name: single for name in table.schema if name not in ("reward", "terminated")
        }
        following = self._nestings["obs"].columns()
        for column in following if self.n_step == 1 else following[:1]:
            windows[f"next_{column}"] = Window(1, 1, column=column, squeeze=True)
        if self.n_step == 1:
            windows |= {"reward": single, "terminated": single}
        else:
            windows["target"] = NStep("reward", self.n_step, self.gamma, "terminated", tuple(following))
        return windows

    def __len__(self) -> int:
        """Number of transitions."""
        return 0 if self.table is None else self.table.num_steps

    # ---------------------------------------------------------------- adding

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        *,
        active: Any = None,
        **more: Any,
    ) -> None:
        """Add one transition of the environment, or of each of n environments.

        Values are numpy arrays, torch tensors of any device, numbers, or what has ``__array__`` or ``__dlpack__``, with
        n in front if there are n environments. Float64 is stored as float32. If an environment's `obs` is not its last
        `next_obs`, the episode before has ended there, as if it had been truncated. Waits for a GPU that holds a value.

        Args:
            obs, action, next_obs: the observation, what was done, and the observation that followed: the last one of
                the episode where it ended, not the first of the next one.
            reward: number, or [n]. terminated, truncated: bool, or bool [n].
            active: bool [n]: environments that took a step; the rows of others are ignored. By default all but those
                that Gymnasium's vector environments only reset (autoreset mode NEXT_STEP): after an end, `obs` is the
                last `next_obs`, the reward 0, and nothing ends.
            more: other columns, from the first call on.

        Raises:
            SchemaError: a value does not fit the columns. Nothing was added.
        """
        values = {"obs": obs, "action": action, **more}
        count, single = self._count(reward)
        schema = None if self.table is None else self.table.schema
        nestings = self._nestings if self.table is not None else self._nestings_of(values)
        if unknown := (values.keys() ^ nestings.keys()):
            raise SchemaError(
                f"The columns {sorted(values)} were given; expected {sorted(nestings)}, as before: {sorted(unknown)}."
            )
        rows = {
            column: _row(column, leaf, count, single, schema)
            for name, value in values.items()
            for column, leaf in nestings[name].leaves(value)
        }
        rows["reward"] = _row("reward", reward, count, single, schema)
        ends = {
            name: _flags(name, each, count)
            for name, each in (("terminated", terminated), ("truncated", truncated))
        }
        rows["terminated"] = ends["terminated"]
        following = {
            column: _row(column, leaf, count, single, schema, "next_")
            for column, leaf in nestings["obs"].leaves(next_obs)
        }
        acting = None if active is None else _flags("active", active, count)
        if self.table is None:
            self._nestings = nestings
            self._begin(rows, count)
        self._append(rows, following, ends["terminated"] | ends["truncated"], acting, resets=not single)

    def _count(self, reward: Any) -> tuple[int, bool]:
        """Number of environments of a call, and whether its values are those of one, without a dimension for it."""
        shape = np.shape(reward) if not isinstance(reward, torch.Tensor) else tuple(reward.shape)
        count = shape[0] if len(shape) == 1 else 1
        if len(shape) > 1 or count == 0 or (self.num_envs or count) != count:
            wanted = (
                "a number, or one for each environment" if self.num_envs is None else f"[{self.num_envs}]"
            )
            raise SchemaError(f"reward has the shape {list(shape)}; expected {wanted}.")
        return count, not shape

    @classmethod
    def _nestings_of(cls, values: Mapping[str, Any]) -> dict[str, Nesting]:
        if taken := [name for name in values if (name in cls._taken and name not in _FIELDS) or "." in name]:
            raise SchemaError(
                f"The columns {taken} were given; expected other names, without dots, than {cls._taken}."
            )
        return {name: Nesting.of(name, value) for name, value in values.items()}

    def _begin(self, rows: Mapping[str, Array], count: int) -> None:
        """Create the table of the first rows."""
        self.num_envs = count
        known = {name: values for name, values in rows.items() if name not in ("reward", "terminated")}
        try:
            self._make(
                {name: _column(name, values.dtype, values.shape[1:]) for name, values in known.items()}
            )
        except BaseException:
            self._nestings = {}
            raise

    def _append(
        self,
        rows: dict[str, Array],
        following: dict[str, Array],
        ended: Array,
        acting: Array | None,
        *,
        resets: bool,
    ) -> None:
        """Write checked rows; `resets`: whether some may only reset their environment."""
        assert self.table is not None
        if self._writer is None:
            self.num_envs = len(ended)
            self._writer = self.table.writers(self.num_envs, commit_every_step=True)
            self._over = np.zeros(self.num_envs, dtype=bool)
        writer, same = self._writer, np.zeros(len(ended), dtype=bool)
        if self._before is not None:
            same = _same(rows, self._before)
            if resets and acting is None and (same & self._over).any():
                acting = ~(same & self._over & (rows["reward"] == 0) & ~ended)
            broken = ~same & (writer.num_steps > 0)
            if acting is not None:
                broken &= acting
            if broken.any():
                writer.commit(broken, final=self._before)
        self._go_on(rows, same, acting)
        done = ended | (writer.num_steps >= self._piece - 1)
        slots = writer.append(rows, done=done, active=acting, final=following if done.any() else None)
        self._note_cuts(np.where(ended, -1, slots))
        self._over = ended if acting is None else ended & acting
        if self._before is None:
            self._before = {name: values.copy() for name, values in following.items()}
        else:
            for name, values in following.items():
                np.copyto(self._before[name], values, casting="unsafe")

    def _go_on(self, rows: dict[str, Array], same: Array, acting: Array | None) -> None:
        """Called before rows are written; `same`: whether each goes on from the one before."""

    def _note_cuts(self, slots: Array) -> None:
        """Called after rows were written, with the trajectory (or -1) of each environment that was cut there."""

    def extend(self, transitions: Mapping[str, Any]) -> None:
        """Add the transitions of one environment, one after another.

        Args:
            transitions: the arguments of `add`, each ``[T, *shape]``.
        """
        missing = [
            name
            for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated")
            if name not in transitions
        ]
        if missing:
            raise SchemaError(
                f"The transitions have no {missing}; expected the arguments of add, each [T, *shape]."
            )
        nestings = {name: Nesting.of(name, value) for name, value in transitions.items()}
        leaves = {
            name: [(c, as_array(v)) for c, v in nestings[name].leaves(value)]
            for name, value in transitions.items()
        }
        lengths = {
            name: len(values) if values.ndim else -1 for parts in leaves.values() for name, values in parts
        }
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise SchemaError(
                f"The transitions have the lengths {lengths}; expected the same length T of all."
            )
        for step in range(next(iter(lengths.values()))):
            self.add(
                **{
                    name: nestings[name].build({column: values[step] for column, values in parts})
                    for name, parts in leaves.items()
                }
            )

    # ---------------------------------------------------------------- sampling

    def sample(self, n: int | None = None) -> Batch:
        """Draw `n` transitions, by default `batch_size`; see `ReplayBuffer`. Does not wait for the GPU.

        Raises:
            TableEmptyError: there is no transition that can be drawn.
        """
        return self._finish(self._drawn_from().sample(n))

    def __iter__(self) -> Iterator[Batch]:
        """Batches without end, prepared ahead."""
        for batch in self._drawn_from():
            yield self._finish(batch)

    def _drawn_from(self) -> ReplayDataset:
        if self.dataset is None or not len(self):
            raise TableEmptyError("The replay buffer is empty; add a transition before the first sample.")
        return self.dataset

    def _finish(self, batch: Batch) -> Batch:
        """The batch of a user from that of the dataset."""
        del batch["mask"]
        if self.n_step == 1:
            following = {name: batch.pop(f"next_{name}") for name in self._nestings["obs"].columns()}
            batch["discount"] = torch.where(batch.pop("terminated"), 0.0, self.gamma)
        else:
            target = batch.pop("target")
            batch.pop(f"next_{self._nestings['obs'].columns()[0]}")
            batch["reward"], batch["discount"], following = (
                target["return"],
                target["discount"],
                target["next"],
            )
        leaves = dict(batch)
        for name, nesting in self._nestings.items():
            if nesting.parts is not None:
                for column in nesting.columns():
                    del batch[column]
                batch[name] = nesting.build(leaves)
        batch["next_obs"] = self._nestings["obs"].build(following)
        return batch

    def update_priority(self, batch: Batch, priority: Any) -> None:
        """Set the priorities of a batch's rows; see `ReplayDataset.update_priority`.

        Args:
            batch: as it was sampled. priority: float32 [B], at least 0.
        """
        self._drawn_from().update_priority(batch, priority)

    # ---------------------------------------------------------------- states and files

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws; `save` keeps the transitions."""
        if self.dataset is None:
            return {} if self._waiting is None else self._waiting
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the draws of a state; that of an empty buffer, when the first transition is added."""
        if self.dataset is None:
            self._waiting = dict(state) or None
        elif state:
            self.dataset.load_state_dict(dict(state))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all transitions into the directory `path`; see `Table.save`.

        Raises:
            TableEmptyError: nothing was added. CheckpointError: the directory cannot be written.
        """
        if self.table is None:
            raise TableEmptyError("The replay buffer is empty; add a transition before the first save.")
        self.table.save(path)
        described = {
            "kind": type(self).__name__,
            "options": self._options(),
            "capacity": self.capacity,
            "num_envs": self.num_envs,
            "nestings": {name: nesting.described() for name, nesting in self._nestings.items()},
        }
        part = Path(path) / f"{_DESCRIPTION}.part"
        part.write_text(json.dumps(described), encoding="utf-8")
        part.replace(Path(path) / _DESCRIPTION)

    def _options(self) -> dict[str, Any]:
        """Options that `save` keeps, for JSON."""
        return {}

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> ReplayBuffer:
        """A buffer with the transitions that `save` has written.

        Args:
            path: the directory. options: as for `ReplayBuffer`, without `capacity`, the spaces and `disk`.

        Raises:
            CheckpointError: the directory does not hold a buffer.
        """
        where = Path(path) / _DESCRIPTION
        try:
            described = json.loads(where.read_text(encoding="utf-8"))
            nestings = {
                name: Nesting.from_description(name, each) for name, each in described["nestings"].items()
            }
            capacity, envs = int(described["capacity"]), int(described["num_envs"])
            kind, saved = described.get("kind", "ReplayBuffer"), dict(described.get("options", {}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{where} cannot be read ({error}); expected what ReplayBuffer.save has written."
            ) from error
        if kind != cls.__name__:
            raise CheckpointError(
                f"{where} is of a {kind}; expected one of a {cls.__name__}. Use {kind}.load."
            )
        buffer = cls(capacity, **{"num_envs": envs, **saved, **options})
        buffer._nestings = nestings
        buffer._use(Table.load(path, name=options.get("name")))
        return buffer


def _space_leaves(nesting: Nesting, space: Any) -> Iterator[tuple[str, Any]]:
    """Column and space of each leaf."""
    if nesting.parts is None:
        yield nesting.name, space
        return
    for key, part in nesting.parts.items():
        yield from _space_leaves(part, space[key])


def _column(name: str, dtype: Any, shape: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """dtype and shape of a column, for values of a numpy dtype."""
    found = None if dtype is None else np.dtype(dtype)
    known = torch.float32 if found == np.float64 else _DTYPES.get(found)  # type: ignore[arg-type]
    if known is None or shape is None:
        raise SchemaError(
            f"{name!r} has dtype {dtype} and shape {shape}; expected arrays of {', '.join(map(str, _DTYPES))}."
        )
    return known, tuple(shape)


def _row(name: str, value: Any, count: int, single: bool, schema: Schema | None, prefix: str = "") -> Array:
    """The values of a column, [n, *shape], of the shape that it has in the schema, if there is one."""
    array = as_array(value)
    array = array[None] if single else array
    shape = array.shape[1:] if schema is None else schema[name].shape
    if array.shape != (count, *shape):
        found, wanted = (array.shape[1:], shape) if single else (array.shape, (count, *shape))
        raise SchemaError(f"{prefix + name!r} has the shape {list(found)}; expected {list(wanted)}.")
    return array


def _flags(name: str, value: Any, count: int) -> Array:
    array = np.atleast_1d(as_array(value))
    if array.shape != (count,) or array.dtype.kind not in "biu":
        raise SchemaError(
            f"{name} has the shape {list(array.shape)} and dtype {array.dtype}; expected bool [{count}]."
        )
    return array.astype(bool)


def _same(rows: Mapping[str, Array], before: Mapping[str, Array]) -> Array:
    """Whether each environment's observation is the one that followed before, bool [n]."""
    same: Array | None = None
    for name, values in before.items():
        equal = rows[name] == values
        if not equal.all():
            equal |= (rows[name] != rows[name]) & (values != values)  # NaN is NaN
        every = equal.reshape(len(equal), -1).all(1)
        same = every if same is None else same & every
    assert same is not None
    return same

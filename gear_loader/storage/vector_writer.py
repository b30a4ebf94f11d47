"""The vector writer: adds the trajectories of n environments at once, one row of each per call."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from gear_loader.errors import GearError, SchemaError
from gear_loader.kernels.special_priorities import UNSET
from gear_loader.native.lanes import LANE_STEPS
from gear_loader.storage.appender import Appender, Bytes, Given, Sink, here, too_long
from gear_loader.storage.final_rows import checked_finals, whole_rows
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.ragged_input import StepValues, with_step_records
from gear_loader.storage.schema import Schema, as_mapping, settled
from gear_loader.utils.arrays import Array, address_of, numbers, shown
from gear_loader.utils.lazy_torch import is_tensor, torch

_BOOL = np.dtype(np.bool_)
_OPTIONS = ("done", "active", "priority", "final", "next")
"""Options of `VectorWriter.append`."""


class VectorWriter:
    """Adds the trajectories of n environments, which take their steps at the same time.

    Created by `Table.writers`, and by `writers` of a remote table. It behaves like n writers (`Writer`), but one call
    of compiled code writes the rows of all environments into their blocks. Use it in one thread. As a context manager
    it commits all open trajectories at the end, or discards them if the block raises::

        with table.writers(envs.num_envs) as writer:
            observation, _ = envs.reset(seed=0)
            reset = np.zeros(envs.num_envs, dtype=bool)  # rows of autoreset mode NEXT_STEP that are no step
            for _ in range(1000):
                action = policy(observation)
                following, reward, terminated, truncated, _ = envs.step(action)
                done = terminated | truncated
                writer.append(
                    observation=observation, action=action, reward=reward.astype(np.float32), done=done, active=~reset
                )
                observation, reset = following, done

    With ``commit_every_step`` each row is visible when `append` returns, one environment after another; with `next` the
    values that follow it too.
    With ``chunk_steps`` the stream of each environment is cut into chunks, as `Writer` does; `done` ends its stream.
    With both the newest steps of the chunks that are being written can be drawn.

    Attributes:
        num_envs: number of environments.
        trajectory: values of the columns per trajectory, ``{name: [n, *shape]}``, of the trajectories that are
            committed next (with ``commit_every_step``, that begin next); None at first. Their arrays may be changed in
            place.
        appended: bool [n], after an error of `append` (but SchemaError): the environments whose row was appended
            nevertheless.
    """

    def __init__(self, sink: Sink, *, chunk_steps: int | None = None, overlap_steps: int = 0) -> None:
        self._sink = sink
        self._appender = Appender(sink, "vector writer", chunk_steps=chunk_steps, overlap_steps=overlap_steps)
        self._schema, self._lanes = sink.schema, sink.lanes
        self.num_envs = n = len(sink.lanes)
        self.trajectory: Mapping[str, Any] | None = None
        self._what = f"the rows (T = {n}, one for each environment)"
        once = {name: column.by_step() for name, column in sink.schema.per_trajectory.items()}
        self._once_schema = Schema(once) if once else None
        self._options = [name for name in _OPTIONS if name in sink.schema.steps]
        self._nobody = np.zeros(n, dtype=bool)
        self._nobody.flags.writeable = False
        self._no_priorities = np.full(n, UNSET, dtype=np.float32)
        self._given = Given(n)
        self.appended: Array = self._nobody
        self._moves = False  # whether rows have `next`

    # ---------------------------------------------------------------- appending

    @property
    def num_steps(self) -> Array:
        """Steps of each environment since its last commit, int64 [n]; with chunks, steps of its current chunk."""
        return self._lanes[:, LANE_STEPS].copy()

    def append(
        self,
        rows: Mapping[str, Any] | None = None,
        /,
        *,
        done: Any = None,
        active: Any = None,
        priority: Any = None,
        final: Mapping[str, Any] | None = None,
        next: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> Array:
        """Append one step of each environment, and commit the trajectories that end with it.

        Args:
            rows, columns: ``[n, *shape]`` for every column, as one mapping or as keywords: numpy arrays or torch
                tensors of exactly the column's dtype; of ragged columns a list of n values. Columns called as one of
                the options below are given in `rows`.
            done: bool [n], array, tensor or list: environments whose trajectory ends with this row; it is committed. By
                default none.
            active: bool [n]: environments that took a step; rows of the others, and their `done`, are ignored. By
                default all. Gymnasium's autoreset mode NEXT_STEP needs it: the row after `done` is a reset.
            priority: initial priority of what this call commits, as for `Table.add`: one number, or [n].
            final: values after the last step, as for `Writer.commit`: ``[n, *shape]`` for each column with
                ``Column(final=True)``, of which the rows of the environments that are done are read. Objects are taken
                too, one for each environment, None where nothing ended: ``{"obs": info.get("final_obs")}`` in
                Gymnasium's autoreset mode SAME_STEP; of a Dict space ``info.get("final_obs")`` itself.
            next: with ``commit_every_step``: values after this step, ``[n, *shape]`` for each column with
                ``Column(final=True)``, of every environment. They are the final step of its trajectory until its next
                row comes, so that each transition can be drawn at once. A row with other values in these columns than
                the row before has as `next` begins another trajectory. It is given in each call, or in none, and then
                without `final`.

        Returns:
            Index of the trajectory (or chunk) that this call has committed for each environment, -1 without one,
            int64 [n]; of a remote table always -1.

        Raises:
            SchemaError: something does not fit, or a trajectory would be longer than the table can hold.
            TableFullError, RateLimitError, LockTimeoutError, PeerTimeoutError: as `Writer.append` and `Writer.commit`.

        After an error nothing was appended, except for environments whose trajectory or chunk this call had committed
        before: `appended`. To try again, repeat the call with ``active=active & ~writer.appended``. With
        ``commit_every_step``, or chunks with an overlap, a trajectory that is in `appended`, and of which the final
        step found no room, stays open: ``commit(mask, final=...)``. After any other exception (Ctrl-C) all open
        trajectories are discarded.
        """
        sink, appender, given = self._sink, self._appender, self._given
        appender.check_usable()
        ending = None if done is None else self._mask("done", done)
        acting = None if active is None else self._mask("active", active)
        self._describe(priority)
        following = None if next is None and not self._moves else self._following(next, final)
        if final is not None:
            ends = self._nobody if ending is None else ending
            ends = ends if acting is None else ends & acting
            given.last = checked_finals(self._schema, final, ends)
        found = self._located(rows, columns)
        if following is not None:
            steps = self._lanes[:, LANE_STEPS]
            longest = int((steps if acting is None else steps[acting]).max(initial=0)) + 2
            if longest > sink.longest:
                raise too_long(longest, sink.longest)
            ahead = sink.ahead(found, following, acting, ending, given)  # type: ignore[attr-defined]
        if final is not None:
            steps = self._lanes[:, LANE_STEPS] + (1 if acting is None else acting)
            appender.check_lengths(steps, ends, final=True)
        self.appended = self._nobody
        before = self._lanes.copy() if sink.grows else None
        due = False  # whether some may be KNOWN_LATER
        try:
            if following is not None:
                self._moves = True
                try:
                    ahead.append()
                finally:
                    given.out[:] = ahead.out
            elif due := sink.add_rows(found, acting, ending, given):
                self._end(ending, acting)
        except GearError:
            if before is not None:
                changed = (self._lanes != before).any(axis=1) & (self._lanes[:, LANE_STEPS] > 0)
                self.appended = changed | (given.out != -1)
                self._end_appended(ending, acting)
            raise
        except BaseException:
            self.close()  # how far the call has come is not known
            raise
        return np.maximum(given.out, -1) if due else given.out.copy()

    def _end_appended(self, ending: Array | None, acting: Array | None) -> None:
        """After an error, end the growing trajectories of environments whose last row is in: it is not repeated."""
        if ending is None:
            return
        over = ending & self.appended & (self._lanes[:, LANE_STEPS] > 0)
        over = over if acting is None else over & acting
        try:
            for lane in np.flatnonzero(over):
                with contextlib.suppress(GearError):  # no room for its final step: it stays open
                    self._sink.end(np.array([lane]), ending, self._given)
        except BaseException:
            self.close()
            raise

    def _end(self, ending: Array | None, acting: Array | None) -> None:
        """Commit chunks and trajectories that have ended; after an error take back the rows of the others."""
        try:
            self._appender.end(ending, acting, self._given)
        except GearError:
            if not self._sink.grows:
                self.appended = self._given.out != -1
                left = ~self.appended if acting is None else acting & ~self.appended
                self._lanes[left, LANE_STEPS] -= 1
            raise

    # ---------------------------------------------------------------- checking

    def _following(self, following: Any, final: Any) -> Bytes:
        """Check `next`, which is given or was before, and that it goes with `final` and with the calls before."""
        begun = not self._moves and bool((self._lanes[:, LANE_STEPS] > 0).any())
        if following is None or final is not None or begun or not self._sink.grows or self._sink.overlap:
            raise SchemaError(
                f"next is {'missing' if following is None else 'given'}"
                f"{'' if final is None else ', and final too'}; expected it with commit_every_step=True, in each "
                "call from the first on, or in none, without final and without overlap_steps. Nothing was appended."
            )
        return checked_finals(self._schema, following, np.ones(self.num_envs, dtype=bool))

    def _describe(self, priority: Any) -> None:
        """Check what trajectories get beside their steps, but for their final ones, and have it ready."""
        given = self._given
        given.priorities = (
            self._no_priorities if priority is None else checked_priorities(priority, self.num_envs)
        )
        given.last = None
        if self._once_schema is not None or self.trajectory is not None:
            given.once, given.ragged = self._checked_trajectory()
        given.out.fill(-1)

    def _located(self, rows: Any, columns: dict[str, Any]) -> Any:
        """Check the rows, which were given by position, by keywords, or both."""
        if rows is None:
            rows = columns
        else:
            rows = as_mapping(rows, self._schema.objects)
            if columns and isinstance(rows, Mapping):
                rows = {**settled(rows), **columns}
        if self._options and (
            taken := [name for name in self._options if isinstance(rows, Mapping) and name not in rows]
        ):
            raise SchemaError(
                f"The columns {taken} are missing: append() has options of that name. Give such columns in one "
                f"mapping, append({{{taken[0]!r}: ..., ...}}, ...). Nothing was appended."
            )
        found = self._sink.located(rows, self._what)
        if found.length != self.num_envs:
            raise SchemaError(
                f"The rows have {found.length} entries; expected arrays [n, ...] with one row for each of the "
                f"{self.num_envs} environments. Nothing was appended."
            )
        return found

    def _mask(self, name: str, value: Any) -> Array:
        """A mask as a contiguous array, bool [n]."""
        if type(value) is not np.ndarray and is_tensor(value) and type(value) is torch.Tensor:
            fits = value.dtype is torch.bool and value.is_cpu and not value.is_nested
            if fits and address_of(value):
                value = value.numpy()
        if type(value) is not np.ndarray:
            value = numbers(value, name, "b", f"a mask, bool [{self.num_envs}]. Nothing was changed")
        if value.dtype != _BOOL or value.shape != (self.num_envs,):
            raise SchemaError(
                f"{name} has dtype {value.dtype} and shape {list(value.shape)}; expected a mask, bool "
                f"[{self.num_envs}], one value for each environment. Nothing was changed."
            )
        return value if value.flags.c_contiguous else np.ascontiguousarray(value)

    def _checked_trajectory(self) -> tuple[Bytes, StepValues | None]:
        """The attribute `trajectory` as bytes, uint8 [n, step_bytes] a column, and its ragged values; SchemaError if it
        does not fit."""
        wanted = sorted(self._schema.per_trajectory)
        if self._once_schema is None or not isinstance(self.trajectory, Mapping):
            raise SchemaError(
                f"The attribute trajectory is {shown(self.trajectory)}; expected arrays [{self.num_envs}, ...] of the "
                f"columns with per='trajectory': {wanted}."
            )
        what = "the attribute trajectory"
        once, ragged = self.trajectory, None
        if self._schema.ragged:
            once, ragged = with_step_records(self._schema.per_trajectory, once, what, by_lane=True)
        once = whole_rows(once, what)
        length, found = self._once_schema.validate(once, what=what)
        if length != self.num_envs:
            raise SchemaError(
                f"The attribute trajectory has {length} rows; expected one for each of {self.num_envs} environments."
            )
        return found, ragged

    # ---------------------------------------------------------------- committing

    def commit(
        self, mask: Any = None, *, priority: Any = None, final: Mapping[str, Any] | None = None
    ) -> Array:
        """Commit open trajectories; the next rows of their environments begin others.

        Args:
            mask: bool [n]: of which environments; all by default. Environments without a step are left out.
            priority, final: as for `append`.

        Returns:
            Index of each environment's trajectory, -1 without one, int64 [n]; of a remote table always -1.

        Raises:
            SchemaError, RateLimitError, LockTimeoutError: as `Writer.commit`. The steps that are not committed are
                kept: the call can be repeated.
        """
        self._appender.check_usable()
        chosen = np.ones(self.num_envs, dtype=bool) if mask is None else self._mask("mask", mask)
        self._describe(priority)
        chosen, given = chosen & (self._lanes[:, LANE_STEPS] > 0), self._given
        if final is not None:
            if self._moves:
                self._following(None, final)
            given.last = checked_finals(self._schema, final, chosen)
            self._appender.check_lengths(self._lanes[:, LANE_STEPS] * chosen, chosen, final=True)
        try:
            self._appender.end(chosen, None, given)
        except GearError:
            raise
        except BaseException:
            self.close()
            raise
        return np.maximum(given.out, -1)

    def discard(self, mask: Any = None) -> None:
        """Discard open trajectories; chunks that are complete stay.

        Args:
            mask: bool [n]: of which environments; all by default.
        """
        self._appender.check_process()
        chosen = np.ones(self.num_envs, dtype=bool) if mask is None else self._mask("mask", mask)
        self._appender.abort(np.flatnonzero(chosen))

    def close(self) -> None:
        """As `discard`; idempotent."""
        if here.pid == self._appender.pid:
            self.discard()

    def __repr__(self) -> str:
        if getattr(self, "appended", None) is None:
            return "<VectorWriter, not opened>"
        steps = int(self.num_steps.sum())
        return (
            f"<VectorWriter of {self.num_envs:,} environments: {steps:,} steps appended since their last commits; to "
            f"{self._sink.name}>"
        )

    def __enter__(self) -> VectorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        self.close()

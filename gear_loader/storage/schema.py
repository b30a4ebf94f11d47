"""Columns of a table (`Column`, `Schema`) and the part of a trajectory in a batch (`Window`)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import operator
import reprlib
import sys
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.casting import can_cast, cast_to
from gear_loader.storage.codecs import Codec, Coded
from gear_loader.storage.dtypes import ITEM_BYTES, NUMPY_DTYPES, DtypeName, dtype_names, torch_dtypes
from gear_loader.storage.quick_check import Expected, located, located_list
from gear_loader.storage.ragged import RECORD_DTYPE, RECORD_SHAPE, TEXTS, Values, msgpack
from gear_loader.utils.arrays import PLAIN_TYPES, address_of, data_address, known, on_host, shown, unreadable
from gear_loader.utils.checks import at_least, finite, flag, integer, one_of
from gear_loader.utils.lazy_torch import is_tensor, torch

_UNPRINTABLE = frozenset({"Cc", "Zl", "Zp"})
"""Unicode categories of control characters and line breaks, which column names must not contain."""
_MOST_DIMENSIONS = 64
_OPTIONS = ("final", "cast", "trajectory", "group", "late", "mutable", *TEXTS.values())
"""Options of a column that are stored with a table: True, ``per="trajectory"``, the same for ``"group"``, or text."""
_CODEC = "codec="
"""Begins the option of a column with a codec, followed by `Codec.to_text`."""
_LARGEST_EXTENT = 2**37 - 1
_MOST_LATE = 62
"""Most columns that are filled later: each has one bit of an int64 a trajectory."""
_MOST_LATE_COUNTED = 24
"""The same if others are mutable: the bits above count a trajectory's edits."""

BATCH_KEYS = ("anchor", "generation", "index", "mask", "priority_weight", "sample_info", "shard")
"""Reserved keys of batches, invalid as column names."""


@dataclasses.dataclass(frozen=True, repr=False)
class Column:
    """One value per step, or per trajectory: a dtype and the shape of a single value.

    Args:
        dtype: one of bool, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, of torch or NumPy,
            such as ``env.observation_space.dtype``; ``str`` or ``bytes``,
            of any length; or ``object``: what msgpack has (None, bool, int, float, str, bytes, list and dict of these),
            stored in its format by the package msgpack, never as a pickle.
        shape: shape of one value; `()` is a scalar. Every extent is at least 1. If the first is None the column is
            ragged: ``Column(torch.uint8, (None, 3))`` has values ``[n, 3]``, each of its own n, 0 too. `Table.add`
            takes a list of them, or a `Ragged`, and text and objects as lists; batches have a `Ragged`, or
            such lists. They lie in memory of their own, `Memory.payload`.
        per: ``"step"``, or ``"trajectory"`` for what a trajectory has once: its goal, task, initial state or return.
            `Table.add` gets it as ``[*shape]``, `Writer.commit` as `trajectory`; batches have ``[B, *shape]`` of it. It
            is stored once, in the trajectory's first block. ``"group"`` for values of any length that a trajectory has
            in common with those that are added with it as their `prefix` (`Table.add`), which do not give them: stored
            once, and read as per trajectory.
        final: whether a trajectory may have one more value of this column after its last step: the observation that
            follows the last action, given as `final` to `Table.add` or `Writer.commit`. Windows read it; it is never an
            anchor.
        cast: whether `Table.add`, `Table.extend` and `Writer.append` convert other dtypes, numbers and lists of them.
            They then take what numpy casts by its rule ``same_kind`` (float64 to float32, int64 to int32 or float32,
            but not floats to integers), of torch tensors too, with bfloat16 as a float; and integers in lists that the
            dtype holds. A number that overflows the dtype is an error. Stored with the table and its checkpoints.
        late: write-once: `Table.fill` writes the values, once, after the trajectory was added: a reward that a scorer
            gives, advantages, log-probabilities of a reference model. `Table.add` and writers do not take the column. A
            dataset that reads it draws only trajectories that have it.
        mutable: whether `Table.set` may overwrite the values of steps: recurrent states, latents, recomputed targets.
            Batches with such a column are gathered by the CPU, for a GPU too. `Shards` over NIXL refuse it.
        codec: a `Codec` or its name, ``"jpeg"``, ``"png"``, ``"webp"``, ``"zstd"``, ``"lz4"`` or ``"video"``: values
            are stored encoded, in the memory of ragged ones, and batches have them decoded. `Table.add` takes arrays
            ``[T, *shape]``, or a list with an array or encoded bytes for each step. Of a fixed shape batches have
            tensors as without a codec; where the first extent of ``"zstd"`` and ``"lz4"`` is None, a `Ragged`; where
            height or width of images are None, lists of tensors.

    Raises:
        SchemaError: an unsupported dtype, a shape that is not a sequence of positive integers, a cast, late or mutable
            that is not a bool, another `per`, `final` of a column per trajectory, or `late` or `mutable` of one with
            final steps; `mutable` of one per trajectory; a ragged column with `final`, `cast` or `mutable`.
    """

    dtype: torch.dtype = dataclasses.field(compare=False)
    shape: tuple[Any, ...] = ()
    per: Literal["step", "trajectory", "group"] = dataclasses.field(default="step", kw_only=True)
    final: bool = dataclasses.field(default=False, kw_only=True)
    cast: bool = dataclasses.field(default=False, kw_only=True)
    late: bool = dataclasses.field(default=False, kw_only=True)
    mutable: bool = dataclasses.field(default=False, kw_only=True)
    codec: Any = dataclasses.field(default=None, kw_only=True)
    dtype_name: str = dataclasses.field(init=False)
    """The stored name of the dtype, for example ``"float32"``."""
    ragged: Values | None = dataclasses.field(init=False, default=None)
    """What the values of a ragged column are; `dtype` and `shape` are then those of the records that a table stores."""

    if TYPE_CHECKING:  # `dtype` is always one of torch

        def __init__(
            self,
            dtype: torch.dtype | np.dtype[Any] | type[np.generic] | type[str] | type[bytes] | type[object],
            shape: Sequence[int | None] | int = (),
            *,
            per: Literal["step", "trajectory", "group"] = "step",
            final: bool = False,
            cast: bool = False,
            late: bool = False,
            mutable: bool = False,
            codec: Codec | str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        flag("Column final", self.final)
        one_of("Column per", self.per, ("step", "trajectory", "group"))
        if self.final and self.trajectory:
            raise SchemaError(
                f"A column has final=True and per={self.per!r}; expected one of them: it has no steps, so none that "
                "follows the last one."
            )
        given: Any = self.dtype
        text = TEXTS.get(given) if isinstance(given, type) else None
        if self.codec is not None:
            object.__setattr__(self, "codec", Codec.of(self.codec))
        if text is not None:
            if self.codec is not None:
                raise SchemaError(
                    f"Column({given.__name__}) has codec={self.codec!r}; expected none of text."
                )
            if self.shape not in ((), (None,)):
                raise SchemaError(
                    f"Column({given.__name__}) has shape {shown(self.shape)}; expected no shape."
                )
            if text == "object":
                msgpack()
            self._make_ragged(Values("uint8", (), text))
            return
        if isinstance(given, np.dtype) or (isinstance(given, type) and issubclass(given, np.generic)):
            given = next((DtypeName(name) for name, dtype in NUMPY_DTYPES.items() if given == dtype), given)
        if isinstance(given, DtypeName):
            name = str(given)
            object.__delattr__(self, "dtype")  # `__getattr__` finds it
        elif isinstance(given, torch.dtype) and given in dtype_names():
            name = dtype_names()[given]
        else:
            raise SchemaError(
                f"Column dtype {shown(given)} is not supported; expected one of torch.{', torch.'.join(ITEM_BYTES)}."
            )
        object.__setattr__(self, "dtype_name", name)
        shape: Any = self.shape
        varies: list[int] = []
        if isinstance(shape, (tuple, list)):
            varies = [
                place
                for place, extent in enumerate(shape[: 1 if self.codec is None else 2])
                if extent is None
            ]
            shape = [1 if place in varies else extent for place, extent in enumerate(shape)]
        if isinstance(shape, (int, np.integer)) and not isinstance(shape, bool):
            shape = (shape,)
        try:
            integers = isinstance(shape, (Sequence, np.ndarray)) and not isinstance(
                shape, (str, bytes, bytearray, memoryview)
            )
            extents = tuple(operator.index(extent) for extent in shape) if integers else ()
            integers = integers and not any(isinstance(extent, (bool, np.bool_)) for extent in shape)
        except TypeError:
            integers, extents = False, ()
        if not integers or any(extent < 1 for extent in extents):
            raise SchemaError(
                f"Column shape {shown(self.shape)} is not a sequence of positive integers; expected the shape of one "
                "step, for example (11,) or () for a scalar; the first may be None, of values of any length."
            )
        if self.codec is not None:
            if self.codec.name == "video" and self.trajectory:
                raise SchemaError(
                    "A column has codec='video' and per='trajectory'; expected frames of steps."
                )
            found = tuple(None if place in varies else extent for place, extent in enumerate(extents))
            self._make_ragged(Values("uint8", (), "coded", Coded(self.codec, name, found)))
            return
        if varies:
            self._make_ragged(Values(name, extents[1:]))
            return
        if self.group:
            raise SchemaError(
                f"A column has per='group' and shape {extents}; expected values of any length, which are stored apart: "
                f"shape {(None, *extents[1:])}, str or bytes."
            )
        object.__setattr__(self, "shape", extents)
        flag("Column cast", self.cast)
        flag("Column late", self.late)
        if self.late and self.final:
            raise SchemaError("A column has late=True and final=True; expected one of them.")
        flag("Column mutable", self.mutable)
        if self.mutable and (self.final or self.trajectory):
            raise SchemaError(
                f"A column has mutable=True, final={self.final} and per={self.per!r}; expected a mutable column with a "
                "value for each step, and none after the last one."
            )

    def _make_ragged(self, values: Values) -> None:
        flag("Column late", self.late)
        given = [name for name in ("final", "cast", "mutable") if getattr(self, name)]
        if given:
            raise SchemaError(
                f"A column of {values!r} has {given[0]}={getattr(self, given[0])!r}; expected none of final, cast and "
                "mutable: its values are of any length."
            )
        self.__dict__.pop("dtype", None)  # `__getattr__` finds it
        for name, value in (("ragged", values), ("dtype_name", RECORD_DTYPE), ("shape", RECORD_SHAPE)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """`dtype` of a column that was made from the name of one, without loading torch before."""
        if name != "dtype":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        dtype = torch_dtypes()[self.dtype_name]
        object.__setattr__(self, "dtype", dtype)
        return dtype

    def __repr__(self) -> str:
        options = f", per={self.per!r}" if self.trajectory else ""
        options += "".join(
            f", {option}=True" for option in ("final", "cast", "late", "mutable") if getattr(self, option)
        )
        kind = (
            f"dtype=torch.{self.dtype_name}, shape={self.shape!r}"
            if self.ragged is None
            else repr(self.ragged)
        )
        return f"Column({kind}{options})"

    @property
    def trajectory(self) -> bool:
        """Whether a trajectory has one value of the column."""
        return self.per != "step"

    @property
    def group(self) -> bool:
        """Whether trajectories that begin with others have the same value."""
        return self.per == "group"

    @property
    def step_bytes(self) -> int:
        """Bytes of one value: of a step, or of a trajectory."""
        count: int = math.prod(self.shape)
        return count * ITEM_BYTES[self.dtype_name]

    @property
    def numpy_dtype(self) -> np.dtype[Any] | None:
        """The dtype in numpy; None for bfloat16."""
        return NUMPY_DTYPES.get(self.dtype_name)

    def by_step(self) -> Column:
        """The same column with a value for each step."""
        name: Any = DtypeName(self.dtype_name)
        return Column(name, self.shape, final=self.final, cast=self.cast)

    def values_of(self, data: np.ndarray) -> Any:
        """Bytes, uint8 [n, step_bytes], as values ``[n, *shape]``: a view, as an array, or as a tensor of bfloat16."""
        dtype, shape = self.numpy_dtype, (len(data), *self.shape)
        if dtype is None:
            return torch.from_numpy(data).view(torch.bfloat16).reshape(shape)
        return data.view(dtype).reshape(shape)


_MOST_CHOSEN = 1 << 10
"""Most steps of a window with `every` or `at`."""
_TOLERANCE = 1e-4
"""Seconds that a step may differ from the time that was asked for, as LeRobot's ``tolerance_s``."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The steps of a trajectory in a batch, relative to an anchor step.

    The window covers the steps ``anchor + offset`` to ``anchor + offset + length - 1``. Steps outside the
    trajectory are padding: zeros in the column (unless `pad` is ``"edge"``), False in the mask.

    With `every` or `at` it has some of these alone, and what lies between is neither copied nor decoded (of a video,
    frames between are decoded as far as those that follow refer to them). Their tensors in a batch are
    ``[B, L, *shape]`` too, with the steps of a row apart in memory: use ``reshape`` on them, not ``view``.

    Args:
        length: number of steps, at least 1; left out with `at`.
        offset: first step relative to the anchor; may be negative.
        pad: position of the padding. ``"keep"`` leaves it in place, ``"head"`` collects it at the head (the existing
            steps end at the last position), ``"tail"`` at the tail (they start at the first). ``"edge"`` leaves it in
            place and repeats the first or the last step of the trajectory instead of zeros, as frame stacks do; it is
            False in the mask all the same.
        column: the column to read, if it is not named like the key in the batch. So one column can have several
            windows: ``{"obs": Window(1), "next_obs": Window(1, 1, column="obs")}``.
        squeeze: for a window of one step: leave out the step dimension: ``[B, *shape]``, and a mask ``[B]``.
        dtype: dtype in the batch, by default the column's: values are converted as by ``Tensor.to``.
        scale: factor of the values: ``(column * scale).to(dtype)``, as PyTorch computes it: the product of integers is
            float32. Images: ``Window(1, dtype=torch.bfloat16, scale=1 / 255)``.
        every: distance of the steps: ``Window(4, offset=-6, every=2)`` has the steps -6, -4, -2 and 0 from the anchor.
        at: the steps, in any order, at most 1,024: ``Window(at=[-8, -2, 0])``, relative to the anchor and `offset`.
            With `fps` in seconds, as LeRobot's ``delta_timestamps``: ``Window(at=[-0.2, 0.0], fps=10)`` has the steps
            -2 and 0.
        fps: steps a second of `at`, whose numbers have to be multiples of ``1 / fps``, up to 0.1 ms.
        timestamps: a column of the steps' times, ascending, for steps that are not equally spaced: `at` is in seconds,
            or in the column's unit, from the time of the anchor, and each is the step whose time is nearest (of two,
            the earlier one). ``Window(at=[-0.1, 0.0], timestamps="timestamp")``. If no step is within `tolerance`, it
            is padding: zeros, or with ``pad="edge"`` the nearest step, and False in the mask.
        tolerance: greatest distance from a time of `at`, in the unit of `timestamps`; by default 1e-4, as LeRobot's
            ``tolerance_s``.

    Example: a trajectory of 3 steps a b c, anchor 0, ``Window(length=4, offset=-1)``, is ``. a b c``; with
    anchor 1 and ``offset=-3`` it is ``. . a b``, which ``pad="tail"`` turns into ``a b . .`` and ``pad="edge"`` into
    ``a a a b``.

    Raises:
        SchemaError: a length below 1, a length or offset that is not an integer, another pad, or `squeeze` with a
            length above 1; a dtype that columns do not have, or a scale that is no finite number; `every` below 1, or
            with `at`; seconds without `fps` or `timestamps`, or between the steps of `fps`; `every` or `at` with `pad`
            ``"head"`` or ``"tail"``; `timestamps` without `at`, or with `fps` or `offset`; a negative `tolerance`, or
            one without `timestamps`.
    """

    length: int = 0
    offset: int = 0
    pad: Literal["keep", "head", "tail", "edge"] = "keep"
    column: str | None = None
    squeeze: bool = False
    dtype: torch.dtype | None = None
    scale: float | None = None
    every: int = dataclasses.field(default=1, kw_only=True)
    at: Sequence[float] | None = dataclasses.field(default=None, kw_only=True)
    fps: float | None = dataclasses.field(default=None, kw_only=True)
    timestamps: str | None = dataclasses.field(default=None, kw_only=True)
    tolerance: float | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.timestamps is not None or self.tolerance is not None:
            self._take_times()
        elif self.at is not None or self.fps is not None:
            self._take_steps()
        object.__setattr__(self, "every", at_least("Window every", self.every))
        object.__setattr__(self, "length", at_least("Window length", self.length))
        object.__setattr__(self, "offset", integer("Window offset", self.offset))
        one_of("Window pad", self.pad, ("keep", "head", "tail", "edge"))
        flag("Window squeeze", self.squeeze)
        if self.length >= 2**31 or abs(self.offset) >= 2**31:
            raise SchemaError(f"{self} is out of range; length and offset must be below 2**31 steps.")
        if (self.every > 1 or self.at is not None) and (
            self.length > _MOST_CHOSEN
            or (self.timestamps is None and max(map(abs, self.reach)) >= 2**31)
            or self.pad not in ("keep", "edge")
        ):
            raise SchemaError(
                f"{self} has every or at; expected at most {_MOST_CHOSEN:,} steps, below 2**31 from the anchor, and "
                "pad 'keep' or 'edge'."
            )
        if self.column is not None and not isinstance(self.column, str):
            raise SchemaError(
                f"Window column is {shown(self.column)}; expected the name of a column, or None."
            )
        if self.squeeze and self.length != 1:
            raise SchemaError(f"{self} has squeeze and {self.length} steps; expected length 1.")
        if self.dtype is not None and not any(self.dtype is dtype for dtype in torch_dtypes().values()):
            raise SchemaError(
                f"Window dtype is {shown(self.dtype)}; expected one of {', '.join(ITEM_BYTES)}, as torch.float32."
            )
        if self.scale is not None and not finite(self.scale):
            raise SchemaError(f"Window scale is {shown(self.scale)}; expected a finite number, or None.")

    def _take_steps(self) -> None:
        """Let `at` be steps, and `length` their number."""
        given, fps = self.at, self.fps
        if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, np.ndarray)) or not len(given):
            raise SchemaError(f"Window at is {shown(given)}; expected a sequence of steps, such as [-2, 0].")
        if fps is not None and not (finite(fps) and fps > 0):
            raise SchemaError(f"Window fps is {shown(fps)}; expected a number above 0: steps a second.")
        steps: list[int] = []
        for each in given:
            if fps is None and isinstance(each, (float, np.floating)):
                raise SchemaError(
                    f"Window at has {shown(each)}; expected steps, as integers, or seconds with fps=: steps a second."
                )
            exact = float(each) * fps if fps is not None and finite(each) else 0.0
            step = integer("Window at", each) if fps is None else round(exact) if abs(exact) < 2**31 else 0
            if fps is not None and not (finite(each) and abs(step / fps - each) <= _TOLERANCE):
                raise SchemaError(
                    f"Window at has {shown(each)}, with fps={fps!r}; expected seconds that are multiples of "
                    f"1 / fps = {1 / fps:.6g}, up to {_TOLERANCE}."
                )
            steps.append(step)
        if self.every != 1 or self.length not in (0, len(steps)):
            raise SchemaError(
                f"Window at has {len(steps)} steps, with length={shown(self.length)} and every={shown(self.every)}; "
                "expected `at` without them."
            )
        for name, value in (("at", tuple(steps)), ("fps", None), ("length", len(steps))):
            object.__setattr__(self, name, value)

    def _take_times(self) -> None:
        """Let `at` be times, and `length` their number."""
        given, name = self.at, self.timestamps
        tolerance = _TOLERANCE if self.tolerance is None else self.tolerance
        if not isinstance(name, str) or not (finite(tolerance) and tolerance >= 0):
            raise SchemaError(
                f"Window timestamps is {shown(name)} and tolerance {shown(self.tolerance)}; expected the name of a "
                "column, and a number of at least 0 in its unit."
            )
        if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, np.ndarray)) or not len(given):
            raise SchemaError(
                f"Window at is {shown(given)}, with timestamps={name!r}; expected a sequence of times from that of "
                "the anchor, such as [-0.1, 0.0]."
            )
        for each in given:
            if not finite(each):
                raise SchemaError(f"Window at has {shown(each)}; expected finite numbers.")
        if self.fps is not None or self.every != 1 or self.offset or self.length not in (0, len(given)):
            raise SchemaError(
                f"Window timestamps is {name!r}, with fps={shown(self.fps)}, every={shown(self.every)}, "
                f"offset={shown(self.offset)} and length={shown(self.length)}; expected `at` without them."
            )
        times = tuple(float(each) for each in given)
        for field, value in (("at", times), ("length", len(times)), ("tolerance", float(tolerance))):
            object.__setattr__(self, field, value)

    @property
    def chosen(self) -> tuple[int, ...] | None:
        """The steps relative to the anchor, of which `every` or `at` leaves some out, or has others in their order.

        None of consecutive ones: their window is the one of this length at `reach`. None of times, whose steps differ
        from row to row.
        """
        if self.timestamps is not None:
            return None
        if self.at is None:
            steps = range(self.offset, self.offset + self.length * self.every, self.every)
            return tuple(steps) if self.length > 1 and self.every > 1 else None
        at = tuple(self.offset + int(step) for step in self.at)
        return None if at == tuple(range(at[0], at[0] + len(at))) else at

    @property
    def reach(self) -> tuple[int, int]:
        """First and last step relative to the anchor."""
        if self.at is None:
            return self.offset, self.offset + (self.length - 1) * self.every
        return self.offset + int(min(self.at)), self.offset + int(max(self.at))

    @property
    def span(self) -> tuple[int, int, str]:
        """Length, offset and padding: windows with the same span have the same mask."""
        return self.length, self.offset, self.pad

    def __repr__(self) -> str:
        fields = [f"length={self.length}, offset={self.offset}, pad={self.pad!r}"]
        given = {
            "column": self.column,
            "squeeze": self.squeeze or None,
            "dtype": self.dtype,
            "scale": self.scale,
            "every": None if self.every == 1 else self.every,
            "at": self.at,
            "timestamps": self.timestamps,
            "tolerance": self.tolerance,
        }
        fields += [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return f"Window({', '.join(fields)})"


def _apart(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The columns, of which no two share their `Values`: what reads values finds their column by these."""
    found: dict[str, Column] = {}
    for name, column in columns.items():
        values = column.ragged
        if values is not None and any(values is each.ragged for each in found.values()):
            column = copy.copy(column)
            object.__setattr__(column, "ragged", dataclasses.replace(values))
        found[name] = column
    return found


class Schema(Mapping[str, Column]):
    """The columns of a table by name, in the given order. A dict inside has the columns ``outer.inner``.

    Raises:
        SchemaError: no column; a name that is not a non-empty string, has control characters or line breaks, or is in
            `BATCH_KEYS`; a value that is not a `Column`.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        columns = as_mapping(dict(columns) if isinstance(columns, Mapping) else columns)
        if not isinstance(columns, Mapping) or not columns:
            raise SchemaError(
                f"A schema of {shown(columns)} was received; expected a mapping of column names to gear_loader.Column, "
                "with at least one column."
            )
        for name, column in columns.items():
            if not isinstance(name, str) or not name:
                raise SchemaError(f"Column name {shown(name)} was received; expected a non-empty string.")
            if any(unicodedata.category(letter) in _UNPRINTABLE for letter in name):
                raise SchemaError(
                    f"Column name {name!r} was received; expected one without control characters and line breaks. "
                    "Rename the column."
                )
            if name in BATCH_KEYS:
                raise SchemaError(
                    f"Column name {name!r} is taken: batches have a key of that name. Rename the column."
                )
            if not isinstance(column, Column):
                raise SchemaError(
                    f"Column {name!r} is {shown(column)}; expected gear_loader.Column(dtype, shape), "
                    "for example Column(torch.float32, (11,))."
                )
        self._columns = columns = _apart(columns)
        if self.ragged and self.finals is not None:
            raise SchemaError(
                f"The columns {list(self.ragged)} are ragged, and {list(self.finals)} have final=True; expected a "
                "table with one of both."
            )
        self.casts = any(column.cast for column in columns.values())
        self._by_step = {name: column for name, column in columns.items() if not column.trajectory}
        most = _MOST_LATE_COUNTED if self.mutable else _MOST_LATE
        if len(self.late) > most:
            raise SchemaError(f"{len(self.late)} columns have late=True; expected at most {most}.")
        if self._by_step and all(column.late for column in self._by_step.values()):
            raise SchemaError(
                f"All columns with a value for each step, {list(self._by_step)}, have late=True; expected at least one "
                "without, which tells how long a trajectory is."
            )
        if not self._by_step:
            raise SchemaError(
                f"All columns, {list(columns)}, are per trajectory; expected at least one with a value for each step. "
                "Leave per= out of the main one, such as tokens: Column(torch.int32) has a step for each token, and "
                "Column(torch.int32, (None,)) one for each text, of which a trajectory may have one."
            )

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Schema({self._columns!r})"

    @functools.cached_property
    def _expected(self) -> tuple[Expected, ...]:
        """What `located` compares with. If torch is not loaded by the first use, tensors are always validated fully."""
        loaded = "torch" in sys.modules
        return tuple(
            Expected(
                name,
                column.dtype if loaded else None,
                column.numpy_dtype,
                column.shape,
                column.trajectory,
                column.step_bytes,
            )
            for name, column in self.items()
        )

    @functools.cached_property
    def steps(self) -> Schema:
        """The columns with a value for each step."""
        return self if len(self._by_step) == len(self._columns) else Schema(self._by_step)

    @functools.cached_property
    def late(self) -> tuple[str, ...]:
        """The columns that `Table.fill` writes, in order: number i has bit i of a trajectory's filled columns."""
        return tuple(name for name, column in self._columns.items() if column.late)

    @functools.cached_property
    def mutable(self) -> tuple[str, ...]:
        """The columns that `Table.set` overwrites."""
        return tuple(name for name, column in self._columns.items() if column.mutable)

    @functools.cached_property
    def added(self) -> Schema:
        """The columns that are given when a trajectory is added: all that are not late."""
        return self if not self.late else Schema({n: c for n, c in self._columns.items() if not c.late})

    @functools.cached_property
    def ragged(self) -> dict[str, Values]:
        """The ragged columns, and what their values are."""
        return {name: column.ragged for name, column in self._columns.items() if column.ragged is not None}

    @functools.cached_property
    def videos(self) -> frozenset[str]:
        """The columns of video."""
        coded = {name: values.coded for name, values in self.ragged.items() if values.coded is not None}
        return frozenset(name for name, each in coded.items() if each.codec.name == "video")

    @functools.cached_property
    def objects(self) -> frozenset[str]:
        """The columns of Python objects."""
        return frozenset(name for name, values in self.ragged.items() if values.kind == "object")

    @functools.cached_property
    def per_group(self) -> tuple[str, ...]:
        """The columns that trajectories have in common with those that they begin with."""
        return tuple(name for name, column in self._columns.items() if column.group)

    def late_bits(self, columns: Iterable[str]) -> int:
        """Bits of those of `columns` that are late; 0 if none is."""
        return sum(1 << self.late.index(name) for name in set(columns) if name in self.late)

    @functools.cached_property
    def per_trajectory(self) -> dict[str, Column]:
        """The columns with one value for each trajectory."""
        return {name: column for name, column in self.items() if column.trajectory}

    @functools.cached_property
    def finals(self) -> Schema | None:
        """The columns with final steps; None without one."""
        found = {name: column for name, column in self.items() if column.final}
        return Schema(found) if found else None

    @functools.cached_property
    def zero_step(self) -> dict[str, np.ndarray]:
        """A step of zeros of every column that has steps, uint8 [1, step_bytes], read-only."""
        zeros = {name: np.zeros((1, column.step_bytes), np.uint8) for name, column in self._by_step.items()}
        for values in zeros.values():
            values.flags.writeable = False
        return zeros

    @functools.cached_property
    def step_bytes(self) -> int:
        """Bytes of one step over all columns that have steps."""
        return sum(column.step_bytes for column in self._by_step.values())

    @functools.cached_property
    def trajectory_bytes(self) -> int:
        """Bytes of what a trajectory has once."""
        return sum(column.step_bytes for column in self.per_trajectory.values())

    def column_bytes(self, name: str, steps: int, trajectories: int) -> int:
        """Bytes of a column's values of so many steps and trajectories."""
        column = self[name]
        return column.step_bytes * (trajectories if column.trajectory else steps)

    def to_json(self) -> list[list[Any]]:
        """``[[name, dtype name, shape, options...], ...]``, as stored with a table; text is uint8 [None]."""
        rows: list[list[Any]] = []
        for name, column in self.items():
            options = [option for option in _OPTIONS if getattr(column, option, False)]
            kind: tuple[str, list[Any]] = column.dtype_name, list(column.shape)
            if column.ragged is not None and column.ragged.coded is not None:
                kind = column.ragged.coded.dtype_name, list(column.ragged.coded.shape)
                options.append(_CODEC + column.codec.to_text())
            elif column.ragged is not None:
                kind = column.ragged.dtype_name, [None, *column.ragged.shape]
                options += [column.ragged.kind] if column.ragged.kind in _OPTIONS else []
            rows.append([name, *kind, *options])
        return rows

    @functools.cached_property
    def json_bytes(self) -> bytes:
        """`to_json` as compact text, for messages."""
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, rows: Any) -> Schema:
        """The inverse of `to_json`. Checks every value, because the source may be untrusted.

        Raises:
            SchemaError: `rows` is not a valid schema.
        """
        if not isinstance(rows, list):
            raise SchemaError(f"Columns {reprlib.repr(rows)} were received; expected a list of columns.")
        columns: dict[str, Column] = {}
        for row in rows:
            codec = row[-1] if isinstance(row, list) and len(row) > 3 else None
            codec = (
                codec.removeprefix(_CODEC) if isinstance(codec, str) and codec.startswith(_CODEC) else None
            )
            row = row[:-1] if codec is not None else row
            fits = isinstance(row, list) and len(row) >= 3 and len(row) <= 3 + len(_OPTIONS)
            fits = fits and all(option in _OPTIONS and row[3:].count(option) == 1 for option in row[3:])
            if not fits:
                raise SchemaError(
                    f"Column {reprlib.repr(row)} was received; expected [name, dtype, shape], and its options out of "
                    f"{', '.join(_OPTIONS)}."
                )
            name, dtype, shape, *options = row
            if not isinstance(name, str) or name in columns:
                raise SchemaError(f"Column name {reprlib.repr(name)} was received; expected each name once.")
            if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
                raise SchemaError(
                    f"Column dtype {reprlib.repr(dtype)} was received; expected one of {', '.join(ITEM_BYTES)}."
                )
            fits = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
            if not fits or not all(
                (type(extent) is int and 1 <= extent <= _LARGEST_EXTENT)
                or (extent is None and place < (1 if codec is None else 2))
                for place, extent in enumerate(shape)
            ):
                raise SchemaError(
                    f"Column shape {reprlib.repr(shape)} was received; expected at most {_MOST_DIMENSIONS} positive "
                    "integers."
                )
            given: dict[str, Any] = dict.fromkeys(options, True)
            per = [per for per in ("group", "trajectory") if given.pop(per, False)]
            given |= {"per": per[0]} if per else {}
            text = next((kind for kind, option in TEXTS.items() if given.pop(option, False)), None)
            if text is not None and (dtype, shape) != ("uint8", [None]):
                raise SchemaError(
                    f"Column {reprlib.repr(row)} was received; expected text as uint8 of shape [None]."
                )
            if codec is not None:
                given["codec"] = Codec.from_text(codec)
            named: Any = text or DtypeName(dtype)
            columns[name] = Column(named, tuple(shape), **given)
        return cls(columns)

    # ---------------------------------------------------------------- rows

    def locate_fast(self, rows: Any) -> tuple[int, list[int], list[Any]] | None:
        """`locate` of contiguous CPU data of the exact dtypes in a dict; None for all else, valid or not."""
        return located(self._expected, rows)

    def locate_list(self, rows: Any) -> tuple[np.ndarray, np.ndarray, list[Any]] | None:
        """`locate_fast` of a list or a tuple; see `located_list`."""
        return located_list(self._expected, rows)

    def locate(
        self, rows: Mapping[str, Any], *, what: str = "the trajectory"
    ) -> tuple[int, list[int], object]:
        """Check one trajectory and return the addresses of its columns.

        Args:
            rows, what: as for `validate`.

        Returns:
            T; address of each column's contiguous steps; object that owns this memory.

        Raises:
            SchemaError: as `validate`.
        """
        rows = as_mapping(rows)
        found = located(self._expected, rows)
        if found is not None:
            return found
        length, arrays = self.validate(rows, what=what)
        return length, [array.ctypes.data for array in arrays.values()], arrays

    def locate_stacked(self, rows: Mapping[str, Any], count: int) -> tuple[int, list[int], list[int]] | None:
        """Fast path for the addresses of stacked trajectories.

        Args:
            rows: column name -> ``[count, T, *shape]``, or ``[count, *shape]`` of columns per trajectory; contiguous,
                on the CPU, of exactly the column's dtype.
            count: number of trajectories.

        Returns:
            T; address of each column; bytes from one trajectory to the next. None if a full validation is needed.
        """
        if type(rows) is not dict or len(rows) != len(self._columns):
            return None
        padded, addresses, strides = -1, [], []
        for name, dtype, array_dtype, shape, once, _ in self._expected:
            value = rows.get(name)
            if type(value) is np.ndarray:
                fits = value.dtype == array_dtype and array_dtype is not None and value.flags.c_contiguous
            elif is_tensor(value) and type(value) is torch.Tensor:
                fits = value.dtype is dtype and value.layout is torch.strided and value.is_cpu
                fits = fits and not value.is_nested and value.is_contiguous() and not value.is_neg()
            else:
                return None
            if once:
                if not fits or value.shape != (count, *shape):
                    return None
            else:
                if not fits or value.ndim != len(shape) + 2 or value.shape[2:] != shape:
                    return None
                padded = value.shape[1] if padded < 0 else padded
                if value.shape[:2] != (count, padded):
                    return None
            address = data_address(value) if isinstance(value, np.ndarray) else address_of(value)
            if not address:
                return None
            addresses.append(address)
            strides.append(value.nbytes // max(count, 1))
        return (padded, addresses, strides) if padded > 0 else None

    def validate(
        self, rows: Mapping[str, Any], *, what: str = "the trajectory"
    ) -> tuple[int, dict[str, np.ndarray]]:
        """Check one trajectory and return its length and its columns as bytes.

        Args:
            rows: column name -> numpy array or torch tensor ``[T, *shape]``, or ``[*shape]`` of columns per trajectory,
                of exactly the column's dtype; for columns that cast, also of others, or lists. A scalar per trajectory
                may be a number.
            what: name of the trajectory in errors.

        Returns:
            T, and for each column a C-contiguous uint8 array ``[T, step_bytes]``, or ``[1, step_bytes]``. Contiguous
            CPU data in a dict is not copied; a CUDA tensor is copied to the host, which waits for its stream once
            for all columns.

        Raises:
            SchemaError: a missing or unknown column, a wrong type, dtype or shape, uneven lengths, or no steps.
        """
        rows = as_mapping(rows)
        if not isinstance(rows, Mapping):
            raise SchemaError(
                f"{what} is a {type(rows).__name__}; expected a mapping of column names to arrays [T, ...] "
                f"with the columns {list(self)}."
            )
        self.validate_names(rows, what=what)
        rows = self.cast(settled(rows), what=what)
        arrays = {
            name: self._once_as_bytes(name, rows[name], what)
            if column.trajectory
            else self._as_bytes(name, rows[name], what)
            for name, column in self.items()
        }
        lengths = {name: len(arrays[name]) for name in self._by_step}
        if len(set(lengths.values())) != 1:
            raise SchemaError(
                f"{what} has columns of uneven lengths: {lengths}. Expected as many steps in each."
            )
        length = next(iter(lengths.values()))
        if length == 0:
            raise SchemaError(f"{what} has zero steps; expected at least one.")
        return length, arrays

    def cast(self, rows: Mapping[str, Any], *, what: str) -> Mapping[str, Any]:
        """Convert arrays of other libraries, and the values of columns that cast; other values are left unchanged.

        Tensors of a GPU are copied to the host, which waits for their stream once.

        Raises:
            SchemaError: a value that cannot be converted.
        """
        rows = on_host(rows)[0]
        if not self.casts and all(type(value) in PLAIN_TYPES or is_tensor(value) for value in rows.values()):
            return rows
        return {name: self._cast(name, value, what) for name, value in rows.items()}

    def _cast(self, name: str, value: Any, what: str) -> Any:
        column = self._columns.get(name)
        if type(value) not in PLAIN_TYPES:
            value = known(value, f"Column {name!r} of {what}")
        if column is None or not column.cast:
            return value
        named = f"Column {name!r} of {what}"
        kind = unreadable(value) if is_tensor(value) else None
        return value if kind is not None else cast_to(value, column.dtype_name, named)

    def validate_names(self, rows: Mapping[str, Any], *, what: str) -> None:
        """Check that `rows` has exactly the schema's columns.

        Raises:
            SchemaError: a column is missing or unknown.
        """
        missing = [name for name in self if name not in rows]
        unknown = [name for name in rows if name not in self._columns]
        if missing or unknown:
            raise SchemaError(
                f"{what} has the columns {shown(list(rows))}; missing: {missing}, unknown: {shown(unknown)}. "
                f"Expected exactly {list(self)}."
            )

    def validate_once(self, values: Any, *, what: str) -> dict[str, np.ndarray]:
        """Check the values that a trajectory has once.

        Args:
            values: column name -> ``[*shape]``, of all columns per trajectory. what: name of the values in errors.

        Returns:
            For each a uint8 array ``[1, step_bytes]``, which may be the memory of the value.

        Raises:
            SchemaError: a missing or unknown column, a wrong type, dtype or shape.
        """
        return self._validate_each(values, self.per_trajectory, "per='trajectory'", what)

    def validate_final(self, values: Any, *, what: str) -> dict[str, np.ndarray]:
        """As `validate_once`, of the values after the last step, of all columns with final steps."""
        wanted = {} if self.finals is None else self.finals._columns
        return self._validate_each(values, wanted, "Column(final=True)", what)

    def _validate_each(
        self, values: Any, wanted: Mapping[str, Column], kind: str, what: str
    ) -> dict[str, np.ndarray]:
        values, found = settled(exactly(values, wanted, kind, what)), {}
        for name, column in wanted.items():
            value, dtype = values[name], column.numpy_dtype
            if type(value) is not np.ndarray or dtype is None or value.dtype != dtype:
                break
            if value.shape != column.shape or not value.flags.c_contiguous:
                break
            found[name] = value.reshape(1, -1).view(np.uint8)
        else:  # the commonest
            return found
        values = self.cast(values, what=what)
        return {name: self._once_as_bytes(name, values[name], what) for name in wanted}

    def _once_as_bytes(self, name: str, value: Any, what: str) -> np.ndarray:
        column = self._columns[name]
        if isinstance(value, (bool, int, float, np.generic)) and not column.shape:
            number = value.item() if isinstance(value, np.generic) else value
            given = cast_to([number], column.dtype_name, f"Column {name!r} of {what}")
        else:
            kind = _unsupported(value)
            if kind is not None or tuple(value.shape) != column.shape:
                found = f"a {kind}" if kind is not None else f"of shape {list(value.shape)}"
                raise SchemaError(
                    f"Column {name!r} of {what} is {found}; expected one value of shape {list(column.shape)} and "
                    f"torch.{column.dtype_name}."
                )
            given = value[None]
        return self._as_bytes(name, given, what)

    def _as_bytes(self, name: str, value: Any, what: str) -> np.ndarray:
        column = self._columns[name]
        dtype, shape = column.numpy_dtype, column.shape
        plain = type(value) is np.ndarray and dtype is not None and value.dtype == dtype and value.ndim > 0
        if (
            plain and value.shape[1:] == shape and value.flags.c_contiguous
        ):  # the commonest, and no text is needed
            found: np.ndarray = value.reshape(len(value), math.prod(shape)).view(np.uint8)
            return found
        wanted = f"torch.{column.dtype_name}"
        expected = f"[{', '.join(map(str, ('T', *column.shape)))}]"
        kind = _unsupported(value)
        if kind is not None:
            raise SchemaError(
                f"Column {name!r} of {what} is a {kind}; expected a numpy array or a torch tensor "
                f"of {wanted} and shape {expected}."
                f"{' With cast=True the column takes lists.' if isinstance(value, (list, tuple)) else ''}"
            )
        dtype = value.dtype
        if is_tensor(value):
            fits = dtype == column.dtype
        else:  # some versions of numpy compare float64 equal to None
            fits = column.numpy_dtype is not None and dtype == column.numpy_dtype
        if not fits:
            raise SchemaError(
                f"Column {name!r} of {what} has dtype {dtype}; expected {wanted}. "
                f"Convert it first ({_conversion(value, column)})"
                f"{', or give the column cast=True' if can_cast(dtype, column.dtype_name) else ''}."
            )
        if tuple(value.shape[1:]) != column.shape or value.ndim == 0:
            raise SchemaError(
                f"Column {name!r} of {what} has shape {list(value.shape)}; expected {expected}."
            )
        if is_tensor(value):
            tensor = value.detach().resolve_neg().cpu()
            value = (tensor.view(torch.int16) if column.numpy_dtype is None else tensor).numpy()
        array = np.ascontiguousarray(value).reshape(len(value), math.prod(column.shape))
        return array.view(np.uint8)


def as_mapping(rows: Any, objects: Collection[str] = ()) -> Any:
    """Convert a TensorDict, or a dict with dicts in it, to a dict of its columns; return other values unchanged.

    Values of the columns `objects` are left as they are.

    Keys are joined by dots: ``{"obs": {"image": x}}`` has the column ``obs.image``. A TensorDict (or tensorclass) of
    the package tensordict is a mapping that iterates over its steps instead of its keys. It is recognised by its
    interface: `keys`, `items` and `batch_size`. No data are copied.

    Raises:
        SchemaError: two leaves would be the same column.
    """
    if isinstance(rows, dict):
        if type(rows) is not dict or dict not in map(type, rows.values()):
            return rows
    elif not all(hasattr(rows, name) for name in ("batch_size", "items", "keys")):
        return rows
    columns: dict[Any, Any] = {}
    for name, value in rows.items():
        if name in objects:
            inner = value
        else:
            inner = as_mapping(
                value, [each[len(name) + 1 :] for each in objects if each.startswith(f"{name}.")]
            )
        # Text and other objects are TensorDicts without entries that are not empty.
        plain = (inner is value and (type(value) is not dict or name in objects)) or (
            not inner and hasattr(value, "is_empty") and not value.is_empty()
        )
        leaves = {name: value} if plain else {f"{name}.{leaf}": part for leaf, part in inner.items()}
        twice = [leaf for leaf in leaves if leaf in columns]
        if twice:
            raise SchemaError(
                f"Two entries would be the column {twice[0]!r}, as nested keys are joined by dots; rename one of them."
            )
        columns.update(leaves)
    return columns


def exactly(
    values: Any, wanted: Collection[str], kind: str, what: str, objects: Collection[str] = ()
) -> Mapping[str, Any]:
    """A mapping, or a TensorDict as one, if it has exactly the columns `wanted`.

    Args:
        kind: what those columns have, in errors. what: name of the values there. objects: as of `as_mapping`.

    Raises:
        SchemaError: anything else.
    """
    values = as_mapping(values, objects)
    if isinstance(values, Mapping) and set(values) == set(wanted):
        return values
    given = f"has {sorted(map(str, values))}" if isinstance(values, Mapping) else f"is {shown(values)}"
    raise SchemaError(f"{what} {given}; expected the columns {sorted(wanted)}: all with {kind} and no other.")


def keeps(iterable: Any) -> bool:
    """Whether an iterable holds all its items at once: a list or a tuple.

    Any other iterable may refill the same arrays for each item, so each item must be copied before the next is
    requested.
    """
    return type(iterable) in (list, tuple)


def settled(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    """Copy the values of a mapping that is not a dict, because it may compute all values into one array."""
    if type(rows).__getitem__ is dict.__getitem__:
        return rows
    return {name: copied(rows[name]) for name in rows}


def copied(value: Any) -> Any:
    """Copy an array or a readable tensor; return other values unchanged."""
    if is_tensor(value):
        return value.detach().clone() if unreadable(value) is None else value
    if isinstance(value, (list, tuple)):
        return [copied(each) for each in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _unsupported(value: Any) -> str | None:
    """Description of a value that cannot be copied byte by byte, for errors; None if it can."""
    if is_tensor(value):
        return unreadable(value)
    plain = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    return None if plain else type(value).__name__


def _conversion(value: Any, column: Column) -> str:
    if column.numpy_dtype is not None and isinstance(value, np.ndarray):
        return f".astype(np.{column.numpy_dtype.name})"
    return f"torch.as_tensor(values).to(torch.{column.dtype_name})"

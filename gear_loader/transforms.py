"""Transforms of batches: dtypes, running normalisation, random crops and shifts of images.

A transform is any callable that takes a batch and returns one, for the `transform` of a `ReplayDataset` or
`ReplayBuffer`. The dataset looks for these, in functions and objects alike:

============================================ ==========================================================================
an argument ``generator``                    gets a `torch.Generator` of the CPU, whose seed is a function of the
                                             dataset's seed, epoch and the batch's number
``state_dict()``, ``load_state_dict(state)`` saved and restored with the state of the dataset
``evaluation()``                             returns what takes its place in validation, test and prediction
============================================ ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.storage.statistics import Statistics
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least, finite, flag
from gear_loader.utils.packing import upload

__all__ = ["Normalize", "RandomCrop", "RandomShift", "ToDtype"]


class _OfColumns:
    """Base of transforms of named columns.

    Attributes:
        columns: names of a batch's entries. A dot leads into a nested one: ``"obs.camera"``, ``"target.return"``.
    """

    def __init__(self, columns: tuple[Any, ...]) -> None:
        if not columns or not all(isinstance(name, str) for name in columns):
            raise SchemaError(
                f"{type(self).__name__} was given the columns {shown(columns)}; expected one name or more."
            )
        self.columns: tuple[str, ...] = columns

    def _replace(self, batch: Any, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put a function of the entry `name` of a batch into its place."""

        def of(value: torch.Tensor) -> torch.Tensor:
            if not isinstance(value, torch.Tensor):
                raise SchemaError(
                    f"{self!r} was given {name!r}, which is a {type(value).__name__} in the batch; expected a tensor. "
                    "Name one of its parts, with a dot between."
                )
            return change(value)

        changed = _changed(batch, name, of)
        if changed is None:
            raise SchemaError(f"{self!r} names {name!r}, which is not in the batch; it has {_names(batch)}.")
        batch.update(changed)

    def __repr__(self) -> str:
        options = [repr(name) for name in self.columns]
        options += [f"{name}={value!r}" for name, value in self._options().items()]
        return f"{type(self).__name__}({', '.join(options)})"

    def _options(self) -> dict[str, Any]:
        """Options for the `repr`."""
        return {}


def _changed(value: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """A nested value with the entry `name` changed; None if there is none."""
    if isinstance(value, tuple):
        found = _changed({str(key): part for key, part in enumerate(value)}, name, change)
        return None if found is None else tuple(found.values())
    if not isinstance(value, Mapping):
        return None
    if name in value:
        return {**value, name: change(value[name])}
    for key, part in value.items():  # keys may have dots themselves
        if name.startswith(f"{key}."):
            inner = _changed(part, name[len(str(key)) + 1 :], change)
            if inner is not None:
                return {**value, key: inner}
    return None


def _names(value: Any, prefix: str = "") -> list[str]:
    """Names of all tensors of a nested value."""
    if isinstance(value, tuple):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return [prefix]
    return [
        name
        for key, part in value.items()
        for name in _names(part, f"{prefix}.{key}" if prefix else str(key))
    ]


class ToDtype(_OfColumns):
    """Converts columns: ``ToDtype("obs", "next_obs", scale=True)`` makes float32 from 0 to 1 of uint8 images.

    ``Window(..., dtype=, scale=)`` does the same while a batch is gathered, without another pass over it.

    Args:
        *columns: names of the batch's entries.
        dtype: the dtype.
        scale: divide integers by the largest value of their dtype; `dtype` is then one of floating point.

    Raises:
        SchemaError: an invalid option; at the first batch: an unknown column.
    """

    def __init__(self, *columns: str, dtype: torch.dtype = torch.float32, scale: bool = False) -> None:
        super().__init__(columns)
        if not isinstance(dtype, torch.dtype) or (flag("scale", scale) and not dtype.is_floating_point):
            raise SchemaError(
                f"dtype is {shown(dtype)} and scale {scale}; expected a torch.dtype, of floating point to scale."
            )
        self.dtype, self.scale = dtype, scale

    def _options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "scale": self.scale}

    def __call__(self, batch: Any) -> Any:
        for name in self.columns:
            self._replace(batch, name, self._convert)
        return batch

    def _convert(self, values: torch.Tensor) -> torch.Tensor:
        if self.scale and not values.dtype.is_floating_point and values.dtype != torch.bool:
            values = values / torch.iinfo(values.dtype).max
        return values.to(self.dtype)


class Normalize(_OfColumns):
    """Subtracts the running mean of a column and divides by its running standard deviation; the result is float32.

    ``Normalize("obs", "next_obs")``: mean and variance of each element of the first column, over the rows and steps of
    all batches so far (Chan et al., 1982). All columns are normalised with them, and must have the same shape
    ``[*shape]``. Steps outside the mask do not count, and become 0. Does not wait for the GPU.

    The statistics are part of the dataset's state. In validation, test and prediction they are used but not changed.
    Each rank has its own. They depend on the order of batches, so `DataLoader` workers need ``frozen=True``.

    ``Normalize("obs", "next_obs", statistics=table.statistics)`` uses those of the column ``obs`` in the whole table,
    which do not change.

    Args:
        *columns: names of the batch's entries.
        eps: added to the variance.
        clip: largest absolute value of the result; None for any.
        frozen: whether the statistics no longer change. An attribute, which may be set at any time.
        statistics: of a table, `Table.statistics`, with the first of the columns.

    Raises:
        SchemaError: an invalid option; at the first batch: an unknown column.
    """

    def __init__(
        self,
        *columns: str,
        eps: float = 1e-8,
        clip: float | None = None,
        frozen: bool = False,
        statistics: Statistics | None = None,
    ) -> None:
        super().__init__(columns)
        if not finite(eps) or eps < 0 or (clip is not None and (not finite(clip) or clip <= 0)):
            raise SchemaError(
                f"eps is {shown(eps)} and clip {shown(clip)}; expected eps of at least 0, and clip above 0 or None."
            )
        self.eps, self.clip, self.frozen = float(eps), clip, flag("frozen", frozen)
        # Count, mean and sum of squared deviations, float64; never changed in place.
        self._moments: _Moments | None = None
        if statistics is not None:
            if not isinstance(statistics, Mapping) or columns[0] not in statistics:
                raise SchemaError(
                    f"statistics is {shown(statistics)}; expected those of a table, with the column {columns[0]!r}."
                )
            found = statistics[columns[0]]
            parts = (np.float64(found.count), found.mean, np.square(found.std) * found.count)
            self._moments = tuple(torch.tensor(part, dtype=torch.float64, device="cpu") for part in parts)  # type: ignore[assignment]
            self.frozen = True

    def _options(self) -> dict[str, Any]:
        return {"eps": self.eps, "clip": self.clip}

    @property
    def mean(self) -> torch.Tensor | None:
        """float64 ``[*shape]``; None before the first batch."""
        return None if self._moments is None else self._moments[1]

    @property
    def variance(self) -> torch.Tensor | None:
        """float64 ``[*shape]``; None before the first batch."""
        return None if self._moments is None else self._moments[2] / self._moments[0].clamp(min=1)

    def __call__(self, batch: Any) -> Any:
        return self._normalize(batch, update=not self.frozen)

    def _normalize(self, batch: Any, *, update: bool) -> Any:
        masks = batch.get("mask")
        for place, name in enumerate(self.columns):
            mask = masks.get(name) if isinstance(masks, Mapping) else masks

            def change(
                values: torch.Tensor, mask: torch.Tensor | None = mask, first: bool = place == 0
            ) -> torch.Tensor:
                if first and update:
                    self._update(values, mask)
                return self._apply(values, mask)

            self._replace(batch, name, change)
        return batch

    def _update(self, values: torch.Tensor, mask: torch.Tensor | None) -> None:
        rows = values.flatten(0, 0 if mask is None else mask.ndim - 1).double()
        if mask is None:
            count = torch.full((), len(rows), dtype=torch.float64, device=rows.device)
            mean = rows.mean(0)
            squares = (rows - mean).square_().sum(0)
        else:
            there = mask.flatten().double().view(-1, *(1,) * (rows.ndim - 1))
            count = there.sum()
            mean = (rows * there).sum(0) / count.clamp(min=1)
            squares = ((rows - mean).square_() * there).sum(0)
        if self._moments is not None:
            before, mean_before, squares_before = _moved(self._moments, rows.device)
            if mean_before.shape != mean.shape:
                raise SchemaError(
                    f"{self!r} was given values of shape {list(mean.shape)}; expected {list(mean_before.shape)}, as "
                    "before."
                )
            delta, total = mean - mean_before, (before + count).clamp(min=1)
            mean = mean_before + delta * (count / total)
            squares = squares_before + squares + delta.square() * (before * count / total)
            count = before + count
        self._moments = count, mean, squares

    def _apply(self, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        result = values.float()
        if self._moments is not None:
            if self._moments[0].device != result.device:  # of a loaded state
                self._moments = _moved(self._moments, result.device)
            count, mean, squares = self._moments
            factor = (squares / count.clamp(min=1) + self.eps).rsqrt()
            result = (result - mean.float()) * factor.float()
            if self.clip is not None:
                result = result.clamp_(-self.clip, self.clip)
        if mask is None:
            return result
        return torch.where(mask.view(*mask.shape, *(1,) * (result.ndim - mask.ndim)), result, 0.0)

    def evaluation(self) -> Callable[[Any], Any]:
        """A transform that uses the statistics of this one and does not change them."""
        return _Unchanged(self)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """``count``, ``mean`` and ``squares`` (of deviations, their sum), float64; empty before the first batch."""
        return {} if self._moments is None else dict(zip(_MOMENTS, self._moments, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the statistics of a state.

        Raises:
            SchemaError: the state is of something else. Nothing was changed.
        """
        if not isinstance(state, Mapping) or (state and set(state) != set(_MOMENTS)):
            raise SchemaError(f"The state is {shown(state)}; expected that of a Normalize, {_MOMENTS}.")
        self._moments = (
            tuple(torch.as_tensor(state[name], dtype=torch.float64, device="cpu") for name in _MOMENTS)
            if state
            else None  # type: ignore[assignment]
        )


_MOMENTS = ("count", "mean", "squares")
_Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _moved(moments: _Moments, device: torch.device) -> _Moments:
    count, mean, squares = (part.to(device) for part in moments)
    return count, mean, squares


class _Unchanged:
    """Applies a `Normalize` without changing its statistics."""

    def __init__(self, of: Normalize) -> None:
        self._of = of

    def __call__(self, batch: Any) -> Any:
        return self._of._normalize(batch, update=False)


class RandomCrop(_OfColumns):
    """Cuts a rectangle of one size out of each image, at a random place: ``RandomCrop("obs", "next_obs", size=84)``.

    The place is drawn for each row and each column; all images of a row (channels, stacks, steps of a window) have the
    same. In validation, test and prediction it is the middle. Does not wait for the GPU.

    Args:
        *columns: names of the batch's entries, ``[B, ..., H, W]``, of any dtype.
        size: height and width of the result, or one number for both; None for those of the image.
        padding: pixels around the image, which repeat its edge, before it is cut.
        dims: the dimensions of height and width: ``(-3, -2)`` for channels last.
        center: always cut out the middle.

    Raises:
        SchemaError: an invalid option; at the first batch: an unknown column, or an image that is too small.
    """

    def __init__(
        self,
        *columns: str,
        size: int | Sequence[int] | None = None,
        padding: int = 0,
        dims: tuple[int, int] = (-2, -1),
        center: bool = False,
    ) -> None:
        super().__init__(columns)
        self.padding = at_least("padding", padding, least=0)
        pair = size if isinstance(size, Sequence) else (size, size)
        if len(pair) != 2:
            raise SchemaError(f"size is {shown(size)}; expected a number, two of them, or None.")
        self.size = None if size is None else tuple(at_least("size", each) for each in pair)
        whole = isinstance(dims, tuple) and all(isinstance(each, int) for each in dims)
        if not whole or len(dims) != 2 or not dims[0] < dims[1] < 0:
            raise SchemaError(
                f"dims is {shown(dims)}; expected two negative numbers, such as (-2, -1) or, for channels last, "
                "(-3, -2)."
            )
        self.dims, self.center = dims, flag("center", center)

    def _options(self) -> dict[str, Any]:
        return {"size": self.size, "padding": self.padding, "dims": self.dims, "center": self.center}

    def __call__(self, batch: Any, generator: torch.Generator) -> Any:
        for name in self.columns:
            self._replace(batch, name, lambda images: self._crop(images, generator))
        return batch

    def evaluation(self) -> RandomCrop:
        """The crop of the middle."""
        return RandomCrop(*self.columns, size=self.size, padding=self.padding, dims=self.dims, center=True)

    def _crop(self, images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if images.ndim <= -self.dims[0]:
            raise SchemaError(
                f"{self!r} was given values of shape {list(images.shape)}; expected [B, ..., H, W] with height and "
                f"width at {self.dims}."
            )
        moved = images.movedim(self.dims, (-2, -1))
        planes = moved.reshape(len(moved), -1, *moved.shape[-2:])  # [B, R, H, W]
        size = tuple(planes.shape[-2:]) if self.size is None else self.size
        if self.padding:
            planes = _padded(planes, self.padding)
        room = [have - want + 1 for have, want in zip(planes.shape[-2:], size, strict=True)]
        if min(room) < 1:
            raise SchemaError(
                f"{self!r} was given images of {list(moved.shape[-2:])} pixels; expected at least "
                f"{[each - 2 * self.padding for each in size]}."
            )
        if self.center:
            places = [torch.full((len(planes),), (each - 1) // 2, device="cpu") for each in room]
        else:
            places = [torch.randint(each, (len(planes),), generator=generator, device="cpu") for each in room]
        cut = (_cut_on_host if planes.device.type == "cpu" else _cut)(planes, size, *places)
        return cut.reshape(*moved.shape[:-2], *size).movedim((-2, -1), self.dims)


class RandomShift(RandomCrop):
    """Moves each image by at most `pad` pixels in each direction: the augmentation of DrQ (Kostrikov et al., 2020).

    ``RandomShift("obs", "next_obs")``. Pixels from outside repeat the edge. It is a `RandomCrop` of the image's own
    size with `padding`, so in validation, test and prediction it changes nothing.

    Args:
        *columns, dims: as for `RandomCrop`.
        pad: largest shift in pixels.

    Raises:
        SchemaError: an invalid option; at the first batch: an unknown column.
    """

    def __init__(self, *columns: str, pad: int = 4, dims: tuple[int, int] = (-2, -1)) -> None:
        super().__init__(*columns, padding=at_least("pad", pad), dims=dims)

    def _options(self) -> dict[str, Any]:
        return {"pad": self.padding, "dims": self.dims}


def _padded(planes: torch.Tensor, pad: int) -> torch.Tensor:
    """Planes [B, R, H, W] with a border of `pad` pixels that repeat the edge; `torch.nn.functional.pad` does not do
    that for integers."""
    batch, rest, height, width = planes.shape
    out = planes.new_empty(batch, rest, height + 2 * pad, width + 2 * pad)
    middle = out[:, :, pad:-pad]
    middle[..., pad:-pad] = planes
    middle[..., :pad] = planes[..., :1]
    middle[..., -pad:] = planes[..., -1:]
    out[:, :, :pad] = middle[:, :, :1]
    out[:, :, -pad:] = middle[:, :, -1:]
    return out


def _cut(planes: torch.Tensor, size: tuple[int, ...], top: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Rectangles [B, R, *size] of planes [B, R, H, W], at places int64 [B] of the CPU."""
    views = planes.unfold(2, size[0], 1).unfold(3, size[1], 1)  # [B, R, places, places, *size]
    top, left = upload(planes.device, top.numpy(), left.numpy())
    return views[torch.arange(len(planes), device=planes.device), :, top, left]


def _cut_on_host(
    planes: torch.Tensor, size: tuple[int, ...], top: torch.Tensor, left: torch.Tensor
) -> torch.Tensor:
    """The same, row by row: a fifth of the time of `_cut` on the CPU, [256, 9, 84, 84] of uint8."""
    out = planes.new_empty(*planes.shape[:2], *size)
    bits = _BITS[planes.element_size()]
    source, target = planes.view(bits).numpy(), out.view(bits).numpy()
    for row, (y, x) in enumerate(zip(top.tolist(), left.tolist(), strict=True)):
        target[row] = source[row, :, y : y + size[0], x : x + size[1]]
    return out


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16

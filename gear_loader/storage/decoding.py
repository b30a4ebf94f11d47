"""Encoded values: checked and encoded when they are added, decoded into a batch, by as many threads as torch uses."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import CodecError, SchemaError
from gear_loader.storage.codecs import CHANNELS, Coded
from gear_loader.storage.coders import Coder, coder_of, video_of
from gear_loader.storage.dtypes import NUMPY_DTYPES
from gear_loader.storage.ragged import Ragged, arranged
from gear_loader.utils.arrays import Array, shown, unreadable
from gear_loader.utils.lazy_torch import is_tensor, torch
from gear_loader.utils.recycling import Recycler

_MOST_THREADS = 8
_THREAD_BYTES = 1 << 16
"""Encoded bytes of each thread that decodes: to wake one takes as long as some small images."""
_recycler = Recycler()


@functools.cache
def _pool(pid: int, members: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(members, thread_name_prefix="gear-loader-codec")


def _threads() -> int:
    """As many as torch uses; in a process that has not loaded it, as many as it may run on processors."""
    if "torch" in sys.modules:
        return min(torch.get_num_threads(), _MOST_THREADS)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(processors or 1, _MOST_THREADS)


def for_each(count: int, work: Callable[[int], None], most: int = _MOST_THREADS) -> None:
    """Call ``work(i)`` for each i below `count`, in the calling thread and others; raise what the lowest i raised.

    Args:
        most: threads that it is worth.
    """
    numbers, failed = itertools.count(), list[tuple[int, Exception]]()

    def run() -> None:
        while (i := next(numbers)) < count and not failed:
            try:
                work(i)
            except Exception as error:
                failed.append((i, error))

    def help_out(mine: Future[None]) -> None:
        if mine.set_running_or_notify_cancel():
            try:
                run()
            finally:
                mine.set_result(None)

    members = min(_threads(), count, most) - 1
    helping: list[Future[None]] = []  # each before it is given to the pool, which may begin it and fail then
    try:
        if members > 0:
            pool = _pool(os.getpid(), _threads() - 1)
            with contextlib.suppress(
                RuntimeError
            ):  # no thread can start, or the interpreter ends: the others do all
                for _ in range(members):
                    helping.append(Future())
                    pool.submit(help_out, helping[-1])
        run()
        for each in helping:
            if not each.cancel():
                each.result()
    except BaseException:  # interrupted: what others have begun reads and writes the caller's memory
        numbers = itertools.count(count)
        while not all(each.cancel() or each.done() for each in helping):
            with contextlib.suppress(BaseException):
                wait(helping)
        raise
    if failed:
        raise min(failed, key=lambda each: each[0])[1]


# ---------------------------------------------------------------- adding


def encoded(coded: Coded, given: Any, what: str, *, once: bool, whole: bool) -> list[bytes]:
    """Encode values; check those that are encoded already.

    Args:
        given: a list of arrays, tensors or bytes, or an array or a tensor of all; with `once` the one value. what: its
            name in errors. whole: whether they are the steps of one trajectory; else each frame of a video is a key
            frame.

    Raises:
        SchemaError: a value does not fit. ImportError: the codec's package is not installed.
    """
    dtype, video = NUMPY_DTYPES.get(coded.dtype_name), coded.codec.name == "video"
    coder: Any = (video_of if video else coder_of)(coded)
    if isinstance(given, Ragged):
        given = given.tolist()
    if not once and (isinstance(given, np.ndarray) or (is_tensor(given) and unreadable(given) is None)):
        given = list(given.detach().cpu() if is_tensor(given) else given) if given.ndim else given
    if not once and not isinstance(given, (list, tuple)):
        raise SchemaError(
            f"{what} is {shown(given)}; expected a list with an array {list(coded.shape)} of torch.{coded.dtype_name}, "
            f"or {coded.codec.name} as bytes, for each step; or an array of all."
        )
    values = [given] if once else given
    found = [b""] * len(values)
    if video and values and all(isinstance(value, (bytes, bytearray, memoryview)) for value in values):
        found = [bytes(value) for value in values]
        try:
            for group in [found] if whole else [[blob] for blob in found]:
                coder.check(group)
        except Exception as error:
            raise SchemaError(
                f"{what} is bytes that are no packets of a video: {error}; expected arrays or tensors of torch.uint8 "
                f"and shape {list(coded.shape)}."
            ) from error
        return found
    if video:
        most = (coded.codec.key_frames or 10) if whole else 1
        groups = [range(first, min(first + most, len(values))) for first in range(0, len(values), most)]

        def encode(group: int) -> None:
            frames = [_array(coded, dtype, values[i], f"{what}, step {i},") for i in groups[group]]
            found[groups[group].start : groups[group].stop] = coder.encode(frames)

        for_each(len(groups), encode)
        return found

    def work(i: int) -> None:
        value, name = values[i], what if once else f"{what}, step {i},"
        if isinstance(value, (bytes, bytearray, memoryview)):
            found[i] = bytes(value)
            check_encoded(coded, coder, found[i], name)
        else:
            array = _array(coded, dtype, value, name)
            try:
                found[i] = coder.encode(array)
            except (OSError, ValueError) as error:  # such as a width beyond the format's
                raise SchemaError(
                    f"{name} is an array {list(value.shape)}, which cannot be encoded as {coded.codec.name}: {error}."
                ) from error

    for_each(len(values), work)
    return found


def _array(coded: Coded, dtype: Any, value: Any, what: str) -> Array:
    """The value as a contiguous array; of bfloat16 as uint8."""
    value = np.asarray(value) if isinstance(value, np.generic) else value
    tensor = is_tensor(value)
    wrong = unreadable(value) if tensor else None if isinstance(value, np.ndarray) else type(value).__name__
    if wrong is None and value.dtype != (coded.dtype if tensor else dtype):
        wrong = f"{value.dtype} {list(value.shape)}"
    if wrong is None:
        try:
            coded.check_shape(tuple(value.shape))
        except ValueError as error:
            wrong = f"an array of {error}"
    if wrong is not None:
        raise SchemaError(
            f"{what} is {wrong}; expected an array or a tensor of torch.{coded.dtype_name} and shape "
            f"{list(coded.shape)}{'' if coded.codec.name == 'video' else f', or {coded.codec.name} as bytes'}."
        )
    if tensor:
        tensor = value.detach().resolve_neg().cpu().contiguous()
        value = (tensor if dtype is not None else tensor.reshape(-1).view(torch.uint8)).numpy()
    return np.ascontiguousarray(value)


def check_encoded(coded: Coded, coder: Coder, blob: bytes | memoryview, what: str) -> None:
    """Raise SchemaError for bytes that a codec has not made of a value that fits; `what`: its name."""
    try:
        shape = coder.shape(memoryview(blob))
        coded.check_shape(shape)
        if coded.codec.verify:
            coder.decode(memoryview(blob), np.empty(shape, NUMPY_DTYPES.get(coded.dtype_name, np.int16)))
    except Exception as error:
        raise SchemaError(
            f"{what} is {len(blob):,} bytes that are no {coded.codec.name} of torch.{coded.dtype_name} "
            f"{list(coded.shape)}: {error}."
        ) from error


# ---------------------------------------------------------------- reading


def decoded(
    coded: Coded,
    blobs: Sequence[memoryview | None],
    shape: tuple[int, ...],
    *,
    name: Callable[[int], str],
    pinned: bool = False,
    device: torch.device | None = None,
) -> Any:
    """Decode values.

    Args:
        blobs: of n values; None where there is none. The same object again is decoded once.
        shape: how they are arranged. name: of value i, in errors. pinned: into pinned memory.
        device: a GPU that decodes jpegs of one shape, into its memory; those that it cannot are decoded by the CPU.

    Returns:
        A tensor ``[*shape, *coded.shape]``, zeros where there is no value. Where extents vary, a `Ragged` of what was
        compressed; of images a list of tensors, in lists as deep as `shape` has dimensions, empty ones where there is
        no value.

    Raises:
        CodecError: a value is damaged.
    """
    if device is not None and (images := _decoded_on(coded, blobs, device)) is not None:
        return images.view(*shape, *coded.row_shape)
    coder, places = coder_of(coded), dict[int, int]()
    first = [places.setdefault(id(blob), i) for i, blob in enumerate(blobs)]

    def measure(i: int) -> tuple[int, ...]:
        blob = blobs[i]
        if blob is None:
            return tuple(extent or 0 for extent in coded.shape)
        try:
            found = coder.shape(blob)
            coded.check_shape(found)
        except Exception as error:
            raise damaged(coded, name(i), error) from error
        return found

    shapes = None if coded.fixed else list(map(measure, range(len(blobs))))
    result, outs = _room(coded, len(blobs), shapes, shape, pinned)

    def work(i: int) -> None:
        blob = blobs[i]
        if blob is None:
            outs[i][...] = 0
        elif first[i] == i:
            try:
                if shapes is None:
                    coded.check_shape(coder.shape(blob))
                coder.decode(blob, outs[i])
            except Exception as error:
                raise damaged(coded, name(i), error) from error

    size = sum(len(blob) for blob in blobs if blob is not None)
    for_each(len(blobs), work, size // _THREAD_BYTES)
    for i, other in enumerate(first):
        if i != other:
            outs[i][...] = outs[other]
    return result


def _decoded_on(
    coded: Coded, blobs: Sequence[memoryview | None], device: torch.device
) -> torch.Tensor | None:
    """Decode jpegs on a GPU (torchvision, nvJPEG): uint8 ``[n, *shape]``, zeros for None. Waits for the current stream,
    since torchvision writes the memory that it takes from there on a stream of its own.

    Returns:
        None if these are no jpegs of one shape, or one is damaged or of a kind that the GPU cannot decode.
    """
    if coded.codec.name != "jpeg" or not coded.fixed:
        return None
    coder, places, given = coder_of(coded), dict[int, int](), list[torch.Tensor]()
    numbers = [-1 if blob is None else places.setdefault(id(blob), len(places)) for blob in blobs]
    try:
        for number, blob in zip(numbers, blobs, strict=True):
            if blob is not None and number == len(given):
                coded.check_shape(coder.shape(blob))
                given.append(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        if not given:
            return None
        from torchvision import io

        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        mode = io.ImageReadMode.GRAY if coded.row_shape[2] == 1 else io.ImageReadMode.RGB
        images = torch.stack(io.decode_jpeg(given, mode=mode, device=device)).permute(0, 2, 3, 1)
        if images.shape[1:] != coded.row_shape:
            return None
    except (RuntimeError, ValueError):
        return None
    if numbers == list(range(len(numbers))):
        return images.contiguous()
    none = images.new_zeros((1, *images.shape[1:]))
    return torch.cat((images, none))[torch.tensor(numbers, device=device)]


def damaged(coded: Coded, name: str, error: Exception) -> CodecError:
    """The error of a value that cannot be decoded."""
    return CodecError(
        f"{name} is damaged, and cannot be decoded as {coded.codec.name}: {error}. Remove its trajectory; "
        "Codec(verify=True) decodes what is added encoded."
    )


class Group(NamedTuple):
    """Frames of a video that are decoded in one pass.

    Attributes:
        blobs: the values from the key frame on. places: number of a frame -> its places in the result.
    """

    blobs: Sequence[memoryview]
    places: Mapping[int, Sequence[int]]


def decoded_frames(
    coded: Coded,
    groups: Sequence[Group],
    known: Mapping[int, Any],
    count: int,
    shape: tuple[int, ...],
    *,
    name: Callable[[int], str],
    pinned: bool = False,
) -> tuple[torch.Tensor, Array]:
    """As `decoded`, of `count` frames of videos, of which some are known by their place; also as an array of frames."""
    video = video_of(coded)
    result, outs = _room(coded, count, None, shape, pinned)
    for place, frame in known.items():
        outs[place] = frame

    def work(number: int) -> None:
        blobs, places = groups[number]
        first = [outs[places[i][0]] if i in places else None for i in range(len(blobs))]
        try:
            video.decode(blobs, first)
        except Exception as error:
            raise damaged(coded, name(places[min(places)][0]), error) from error
        for same in places.values():
            for place in same[1:]:
                outs[place] = outs[same[0]]

    for_each(len(groups), work)
    return result, outs


def _room(
    coded: Coded, count: int, shapes: list[tuple[int, ...]] | None, shape: tuple[int, ...], pinned: bool
) -> tuple[Any, Any]:
    """What `decoded` returns, and the memory of each value in it."""

    def empty(*extents: int) -> torch.Tensor:
        if pinned:
            return torch.empty(extents, dtype=coded.dtype, device="cpu", pin_memory=True)
        size = math.prod(extents) * coded.dtype.itemsize
        return _recycler.empty(size).view(coded.dtype).view(extents)

    if shapes is None:
        sizes = coded.row_shape
        whole = empty(count, *sizes)
        return whole.view(*shape, *sizes), _memory(whole.view(count, *(sizes or (1,))))
    if coded.codec.name in CHANNELS:
        images = [empty(*each) for each in shapes]
        return arranged(images, shape), [_memory(image) for image in images]
    offsets = torch.zeros(count + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
    bounds = offsets.numpy()
    np.cumsum([each[0] for each in shapes], out=bounds[1:])
    rows = empty(int(bounds[-1]), *coded.row_shape)
    memory = _memory(rows)
    return Ragged._of(rows, offsets, shape), [memory[i:j] for i, j in itertools.pairwise(bounds.tolist())]


def _memory(tensor: torch.Tensor) -> Array:
    """The memory of a tensor as an array; of bfloat16 as of int16."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array

"""Frames of video files as values of a column with ``codec="video"``: the packets of the file, where that can be.

Frames of an episode are cut out of a file without being decoded if the first one is a key frame and none refers to a
later one, which holds for what LeRobot writes: it encodes each episode apart, then joins the packets::

    file      K p K p K | K p K | K p K p        K key frame, p refers to the ones before it
    episodes  0 ------- | 1 --- | 2 -----

Others are decoded, and encoded anew as the column's codec does.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.source_files import SourceFolder
from gear_loader.storage.coders import video_of
from gear_loader.storage.schema import Column
from gear_loader.storage.video import MOST_STEPS, packed
from gear_loader.utils.lazy_torch import torch

_FORMATS = {"h264": "h264", "hevc": "hevc", "libdav1d": "av1", "av1": "av1", "libaom-av1": "av1"}
_SEQUENCE_HEADER = 1  # type of an OBU of AV1
_ENCODED_AT_ONCE = 10


@dataclasses.dataclass(frozen=True)
class _Packet:
    time: float  # of its frame, in seconds
    key: bool
    data: bytes


class Frames:
    """The frames of an episode in a file.

    Args:
        av: PyAV. folder: of the file. name: of the file in it. times: seconds of each frame, float64 [T], ascending.
        tolerance: seconds by which a frame may differ. where: the episode in errors.
    """

    def __init__(
        self, av: Any, folder: SourceFolder, name: str, times: np.ndarray, tolerance: float, where: str
    ) -> None:
        self._av, self._folder, self._name = av, folder, name
        self._times, self._tolerance = times, tolerance
        self._where = f"{where}: the file {folder.at(name)!r}"

    def packets(self, column: Column) -> tuple[list[bytes], bool]:
        """A value for each frame, and whether these are packets of the file.

        Raises:
            SourceError: the file is damaged, lacks a frame, or its frames have another size than the column.
        """
        coded = None if column.ragged is None else column.ragged.coded
        assert coded is not None
        try:
            with self._av.open(self._folder.file_or_path(self._name)) as container:
                stream = _stream(container)
                size = (stream.height, stream.width)
                if size != coded.row_shape[:2]:
                    raise ValueError(f"frames of {size[0]} x {size[1]}; expected {list(coded.shape)}")
                cut = self._cut(container, stream)
            return (cut, True) if cut is not None else (self._encoded(coded), False)
        except SourceError:
            raise
        except (OSError, ValueError, MemoryError, self._av.FFmpegError) as error:
            raise SourceError(
                f"{self._where} cannot be read: {error}. Fetch or write it again, or leave the column out with "
                "columns=[...]."
            ) from error

    def _cut(self, container: Any, stream: Any) -> list[bytes] | None:
        """The packets of the frames; None if they cannot be had without decoding."""
        kind = _FORMATS.get(stream.codec_context.name)
        if kind is None:
            return None
        found = list(self._range(container, stream, kind))
        times = [packet.time for packet in found]
        if sorted(times) != times:  # a frame refers to a later one
            return None
        places = self._places(times)
        first = places[0]
        if not found[first].key or (np.diff(places) != 1).any():
            return None
        values, start = list[bytes](), first
        for place in places.tolist():
            start = place if found[place].key else start
            if place - start >= MOST_STEPS:
                return None
            values.append(packed(kind, place - start, found[place].data))
        return values

    def _range(self, container: Any, stream: Any, kind: str) -> Iterator[_Packet]:
        """The packets from the last key frame before the first frame on, as the decoder needs them."""
        change = _identity
        if kind != "av1":
            filters = require("av.bitstream", "Reading a video")
            change = filters.BitStreamFilterContext(f"{kind}_mp4toannexb", stream).filter
        base, header = float(stream.time_base), bytes(stream.codec_context.extradata or b"")[4:]
        container.seek(int(self._times[0] / base), stream=stream)
        late = 0
        for packet in container.demux(stream):
            if packet.pts is None or packet.dts is None:
                continue
            # Frames that are shown earlier may follow in the file, but not by more than a group.
            late = late + 1 if packet.pts * base > self._times[-1] + self._tolerance else 0
            if late > 32:
                return
            if packet.is_corrupt:
                raise ValueError(f"the packet at {float(packet.pts * base):.4f} s is damaged or cut off")
            time, key = packet.pts * base, bool(packet.is_keyframe)
            for each in change(packet):
                data = bytes(each)
                if kind == "av1" and key and data and (data[0] >> 3) & 15 != _SEQUENCE_HEADER:
                    data = header + data
                yield _Packet(time, key, data)

    def _places(self, times: Sequence[float]) -> np.ndarray:
        """Which of the frames at ascending times are those of the episode."""
        places = np.empty(len(self._times), dtype=np.int64)
        for step, time in enumerate(self._times.tolist()):
            after = bisect.bisect_left(times, time)
            near = [i for i in (after - 1, after) if 0 <= i < len(times)]
            place = min(near, key=lambda i: abs(times[i] - time), default=-1)
            self._check_time(step, None if place < 0 else times[place])
            places[step] = place
        return places

    def _encoded(self, coded: Any) -> list[bytes]:
        """The values of frames that are decoded, a group at a time."""
        video = video_of(coded)
        most = coded.codec.key_frames or _ENCODED_AT_ONCE
        values, group = list[bytes](), list[Any]()
        for frame in self._decoded():
            group.append(frame)
            if len(group) == most:
                values += video.encode(group)
                group = []
        return values + (video.encode(group) if group else [])

    def _decoded(self) -> Iterator[Any]:
        """The frames of the steps, uint8 [h, w, 3], in their order."""
        times = self._times.tolist()
        step = 0
        with self._av.open(self._folder.file_or_path(self._name)) as container:
            stream = _stream(container)
            container.seek(int(times[0] / float(stream.time_base)), stream=stream)
            before: Any = None
            for frame in container.decode(stream):
                if frame.time is None:
                    continue
                # The nearest frame of a step is this one or the one before, once this one is not earlier.
                while step < len(times) and frame.time >= times[step] - 1e-9:
                    near = before if _nearer(before, frame, times[step]) else frame
                    yield self._checked(near, step)
                    step += 1
                if step == len(times):
                    return
                before = frame
            while step < len(times):
                yield self._checked(before, step)
                step += 1

    def _checked(self, frame: Any, step: int) -> Any:
        self._check_time(step, None if frame is None else frame.time)
        return frame.to_ndarray(format="rgb24")

    def _check_time(self, step: int, found: float | None) -> None:
        """Raise ValueError unless the frame nearest to a step is near enough."""
        time = float(self._times[step])
        if found is None or not abs(found - time) <= self._tolerance:
            at = "there is none" if found is None else f"the nearest frame is at {found:.4f} s"
            raise ValueError(
                f"step {step} is at {time:.4f} s, and {at}; expected one within {self._tolerance} s (tolerance_s=)"
            )


def _nearer(before: Any, frame: Any, time: float) -> bool:
    return before is not None and abs(before.time - time) < abs(frame.time - time)


def _identity(packet: Any) -> list[Any]:
    return [packet]


def _stream(container: Any) -> Any:
    if not container.streams.video:
        raise ValueError("it holds no video")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise ValueError("its video is of a codec that is not known")
    return stream


def video_column(av: Any, folder: SourceFolder, name: str, where: str) -> Column:
    """The column of a file's frames.

    Raises:
        SourceError: it is no video, or one whose frames no column holds.
    """
    try:
        with av.open(folder.file_or_path(name)) as container:
            stream = _stream(container)
            return Column(torch.uint8, (stream.height, stream.width, 3), codec="video")
    except SourceError:
        raise
    except (OSError, ValueError, MemoryError, av.FFmpegError) as error:
        raise SourceError(
            f"{where}: the file {folder.at(name)!r} cannot be read: {error}. Fetch or write it again, or leave the "
            "column out with columns=[...]."
        ) from error

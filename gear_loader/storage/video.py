"""Video: the frames of a trajectory as H.264, a packet for each step, by PyAV.

Every `Codec.key_frames` steps a frame stands for itself, and those between differ from the ones before them. None
refers to a later one. So a frame is decoded from the packets of its group up to its own, and groups are independent.
A value is a packet behind four bytes: "GV", and how many steps ago its group began, uint16. Packets that a file has
are stored as they are, of H.265 and AV1 too, with "GH" and "GA" in place of "GV".
"""

from __future__ import annotations

import fractions
import itertools
import struct
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from gear_loader.storage.codecs import Coded
from gear_loader.utils.arrays import Array

_HEADER, _MAGIC = struct.Struct("<2sH"), b"GV"
_MAGICS = {"h264": _MAGIC, "hevc": b"GH", "av1": b"GA"}
_DECODERS = {_MAGIC: "h264", b"GH": "hevc", b"GA": "libdav1d"}
_NAMES = {magic: name for name, magic in _MAGICS.items()}
MOST_STEPS = 1 << 16
"""Most frames of a group."""


def packed(format_name: str, distance: int, packet: bytes) -> bytes:
    """The value of a packet.

    Args:
        format_name: ``"h264"`` or ``"hevc"``, with start codes, or ``"av1"``; key frames hold their parameter sets.
        distance: how many steps ago its group began, below `MOST_STEPS`.
    """
    return _HEADER.pack(_MAGICS[format_name], distance) + packet


def unpacked(value: bytes) -> tuple[str, int, bytes]:
    """The inverse of `packed`."""
    magic, distance = _HEADER.unpack_from(value)
    return _NAMES[magic], distance, value[_HEADER.size :]


class Video:
    """Encodes and decodes groups of frames; several threads may do so at once.

    Args:
        package: PyAV. coded: values [h, w, 3].
    """

    def __init__(self, package: Any, coded: Coded) -> None:
        self._package, self._codec = package, coded.codec
        self._height, self._width, _ = coded.row_shape

    def encode(self, frames: Sequence[Array]) -> list[bytes]:
        """The values of a group of at most `Codec.key_frames` frames."""
        context = self._package.CodecContext.create("libx264", "w")
        context.width, context.height, context.pix_fmt = self._width, self._height, "yuv420p"
        context.time_base, context.thread_count = fractions.Fraction(1, 30), 1
        context.gop_size, context.max_b_frames = len(frames), 0
        crf = 23 if self._codec.crf is None else self._codec.crf
        context.options = {"crf": str(crf), "preset": "veryfast", "tune": "zerolatency"}
        packets: list[Any] = []
        for number, array in enumerate(frames):
            frame = self._package.VideoFrame.from_ndarray(array, format="rgb24")
            frame.pts = number
            packets += context.encode(frame)
        packets += context.encode(None)
        if len(packets) != len(frames) or not packets[0].is_keyframe:
            raise ValueError(f"the encoder made {len(packets)} packets of {len(frames)} frames")
        return [_HEADER.pack(_MAGIC, number) + bytes(packet) for number, packet in enumerate(packets)]

    def distance(self, blob: memoryview) -> int:
        """How many steps ago the group of a value began."""
        if len(blob) <= _HEADER.size or bytes(blob[:2]) not in _DECODERS:
            raise ValueError("no frame of a video")
        distance: int = _HEADER.unpack(blob[: _HEADER.size])[1]
        return distance

    def check(self, blobs: Sequence[bytes]) -> None:
        """Raise ValueError unless values are packets of whole groups; with `Codec.verify` each frame is decoded.

        The size of frames is in the packets of key frames; without `Codec.verify` it is checked when they are decoded.
        """
        first = 0
        for step, blob in enumerate(blobs):
            distance = self.distance(memoryview(blob))
            if distance == 0:
                first = step
            if distance != step - first or blob[:2] != blobs[first][:2]:
                raise ValueError(
                    f"step {step} is frame {distance} of a group; expected frame {step - first}, or 0"
                )
        if self._codec.verify:
            starts = [step for step, blob in enumerate(blobs) if self.distance(memoryview(blob)) == 0]
            for start, stop in itertools.pairwise([*starts, len(blobs)]):
                self.decode([memoryview(blob) for blob in blobs[start:stop]], [None] * (stop - start))

    def decode(self, blobs: Sequence[memoryview], outs: Sequence[Array | None]) -> None:
        """Decode the first frames of a group into `outs`, uint8 [h, w, 3] each; None of those that are not wanted.

        Raises:
            ValueError: a value of another group, or of another size; or an error of PyAV.
        """
        self.distance(blobs[0])
        magic = bytes(blobs[0][:2])
        context = self._package.CodecContext.create(_DECODERS[magic], "r")
        context.thread_count = 1
        most = (self._height + 63) // 64 * 64 * ((self._width + 63) // 64 * 64)
        context.options = {"err_detect": "explode", "max_pixels": str(most)}
        frames: list[Any] = []
        for number, blob in enumerate(blobs):
            if self.distance(blob) != number or bytes(blob[:2]) != magic:
                raise ValueError(f"frame {self.distance(blob)} of a group in place of frame {number}")
            frames += context.decode(self._package.Packet(blob[_HEADER.size :]))
            self._place(frames, number, outs)
        frames += context.decode(None)
        self._place(frames, len(blobs) - 1, outs)
        if len(frames) != len(blobs):
            raise ValueError(f"{len(frames)} frames of {len(blobs)} packets")

    def _place(self, frames: list[Any], last: int, outs: Sequence[Array | None]) -> None:
        """Copy frames that have been decoded; keep none."""
        if len(frames) > last + 1:
            raise ValueError(f"{len(frames)} frames of {last + 1} packets")
        for number, frame in enumerate(frames):
            if frame is None:
                continue
            if (frame.height, frame.width) != (self._height, self._width) or frame.is_corrupt:
                raise ValueError(f"a damaged frame, or one of {frame.height} x {frame.width}")
            out = outs[number]
            if out is not None:
                out[:] = frame.to_ndarray(format="rgb24")
            frames[number] = None


class FrameCache:
    """Decoded frames of this process, at most `most` bytes; those that were used last stay. Threads may share it."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes, self._lock = most, 0, threading.Lock()
        self._frames: OrderedDict[Hashable, Array] = OrderedDict()

    def get(self, key: Hashable) -> Array | None:
        """A frame, for reading."""
        with self._lock:
            found = self._frames.get(key)
            if found is not None:
                self._frames.move_to_end(key)
            return found

    def put(self, key: Hashable, frame: Array) -> None:
        """Keep a copy of a frame."""
        if frame.nbytes > self._most:
            return
        frame = frame.copy()
        with self._lock:
            old = self._frames.pop(key, None)
            self._frames[key] = frame
            self._bytes += frame.nbytes - (0 if old is None else old.nbytes)
            while self._bytes > self._most:
                self._bytes -= self._frames.popitem(last=False)[1].nbytes

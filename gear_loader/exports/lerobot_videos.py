"""Packets of video columns in MP4 files, as they are: PyAV writes the container."""

from __future__ import annotations

import fractions
import io
import os
from collections.abc import Sequence
from typing import Any

from gear_loader.errors import SchemaError
from gear_loader.sources._optional import require
from gear_loader.sources.lerobot_meta import VIDEO_PATH, file_place
from gear_loader.storage.video import unpacked

_PURPOSE = "Writing the videos of a LeRobot data set"
# How FFmpeg names a format's packets one after another, and what stands before each there.
_RAW = {"h264": ("h264", b""), "hevc": ("hevc", b""), "av1": ("obu", b"\x12\x00")}
_MOST_PROBED = 1 << 22  # bytes


class VideoFiles:
    """The files of a camera: frames of episodes, one after another.

    Args:
        root: directory of the data set. key: name of the camera. fps: frames a second. most: about the most bytes of a
            file.

    Attributes:
        info: what ``meta/info.json`` says of the first file.
    """

    def __init__(self, root: str, key: str, fps: int, most: int) -> None:
        self._av = require("av", _PURPOSE)
        self._root, self._key, self._fps, self._most = root, key, fps, most
        self._container: Any = None
        self._stream: Any = None
        self._format = ""
        self._number, self._frames, self._bytes = -1, 0, 0
        self.info: dict[str, Any] = {}

    def add(self, values: Sequence[bytes]) -> dict[str, Any]:
        """Write an episode, into the file that is open, or the next one; return where it is.

        Args:
            values: of a column with ``codec="video"``; the first one is a key frame.

        Raises:
            SchemaError: FFmpeg does not find frames in the packets.
        """
        packets = [unpacked(value) for value in values]
        (kind, _, _), size = packets[0], sum(map(len, values))
        if self._container is None or kind != self._format or self._bytes + size > self._most:
            self.close()
            self._open(kind, packets)
        begin, base = self._frames, fractions.Fraction(1, self._fps)
        for _, distance, data in packets:
            packet = self._av.Packet(data)
            packet.stream, packet.time_base = self._stream, base
            packet.pts = packet.dts = self._frames
            packet.duration, packet.is_keyframe = 1, distance == 0
            self._container.mux(packet)
            self._frames += 1
        self._bytes += size
        place = file_place(self._number)
        named = {**place, "from_timestamp": begin / self._fps, "to_timestamp": self._frames / self._fps}
        return {f"videos/{self._key}/{name}": value for name, value in named.items()}

    def close(self) -> None:
        """Write the end of the file that is open."""
        container, self._container = self._container, None
        if container is not None:
            container.close()

    def _open(self, kind: str, packets: Sequence[tuple[str, int, bytes]]) -> None:
        """Begin the next file, for packets such as these."""
        self._number, self._frames, self._bytes, self._format = self._number + 1, 0, 0, kind
        name = VIDEO_PATH.format(video_key=self._key, **file_place(self._number))
        path = os.path.join(self._root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        form, prefix = _RAW[kind]
        probed, size = [], 0
        for _, _, data in packets:
            probed.append(prefix + data)
            size += len(data)
            if size > _MOST_PROBED:
                break
        try:
            with self._av.open(io.BytesIO(b"".join(probed)), format=form) as raw:
                found = raw.streams.video[0]
                if not found.width or found.pix_fmt is None:
                    raise ValueError("no frame was found in its packets")
                self._container = self._av.open(path, "w", format="mp4", options={"movflags": "faststart"})
                self._stream = self._container.add_stream_from_template(found, opaque=True)
                self._stream.time_base = fractions.Fraction(1, self._fps)
                self.info = self.info or {
                    "video.height": found.height,
                    "video.width": found.width,
                    "video.codec": kind,
                    "video.pix_fmt": found.pix_fmt,
                    "video.is_depth_map": False,
                    "video.fps": self._fps,
                    "video.channels": 3,
                    "has_audio": False,
                }
        except (OSError, ValueError, LookupError, self._av.FFmpegError) as error:
            raise SchemaError(
                f"Column {self._key!r} cannot be written as {kind} into MP4: {error}. Leave it out with columns=[...]."
            ) from error

"""``python -m benchmarks values``: jpegs, video and token sequences, beside what users would pick, on the CPU.

Every store is a process of its own, which draws random values and gives batches of them, by two processes
(`DataLoader`) or two threads; each has the same bytes, and what it delivers is compared with them.

``images``: batches of 64 jpegs of 224 x 224 with the spectrum of photographs (1/f), quality 90, decoded. LeRobot's data
sets of images, with the jpegs in place of the png of its tools; Lance by `SafeLanceDataset`; WebDataset by a pipeline
over tars; `DataLoader` over files; all by Pillow. And decoded images in one tensor, by `torch.save`.

``video``: frames of 224 x 224 of clips that move, as H.264 with a key frame in 2 (LeRobot's default), single and in
windows of 4. LeRobot version 3 by torchcodec and by PyAV, with the same packets.

``tokens``: sequences of log-normal lengths, 100 to 8,000 with a median of 600, in 1 and in 32 ragged columns of int32.
Plain torch has a tensor for each column and joins slices of it; `torch.nested` is made of tensors of a list; Arrow's
`take` reads a mapped file; TransferQueue has its simple storage. Ours is a table of them.

Then bytes stored, and the sum of the PSS of 4 processes that read all of a store, each over the bytes that were handed
over. See `benchmarks/peers/values.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fractions
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.harness import Amount, Session, Variant
from benchmarks.options import experiment, option, some_of
from benchmarks.peers.process import PeerProcess, start

SIZE, SEED, WORKERS, READERS = 224, 3, 2, 4
AHEAD = 6
"""Batches that are not counted: those that processes have made in the turns of others, and more."""
MEDIAN, SIGMA, SHORTEST, LONGEST = 600, 1.0, 100, 8000
STEPS, KEY_FRAMES, CRF = 64, 2, 30
PARTS = ("images", "video", "tokens")
COLUMNS = (1, 32)
UNIT = "bytes / byte handed over"

Parts = option(str, f"Some of {','.join(PARTS)}; all by default.")


@dataclasses.dataclass(frozen=True)
class Store:
    """A variant. kind: its name among the library's. targets: variant -> ratio. shares: readers are measured."""

    name: str
    library: str
    kind: str
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shares: bool = True

    @property
    def required(self) -> bool:
        return self.library.startswith(("gear", "plain"))

    def launch(self, session: Session) -> PeerProcess:
        """A process of it."""
        return start(session.peers, "values", self.library, self.kind, session.threads)


@dataclasses.dataclass(frozen=True)
class Part:
    """What is compared. settings: batch and window. batches: of a turn."""

    name: str
    stores: tuple[Store, ...]
    settings: tuple[tuple[int, int], ...]
    batches: int
    item: str
    label: str

    @property
    def yardstick(self) -> str:
        """A store that needs no other library."""
        return next((store.name for store in self.stores[1:] if store.required), "ours")


OF_IMAGES = {"LeRobot": 2.0, "Lance": 2.0, "WebDataset": 1.0, "DataLoader, files": 1.0}
OF_TOKENS = {"plain torch": 0.8, "torch.nested": 1.0, "Arrow": 1.0, "TransferQueue": 1.0}
IMAGES = Part(
    "images",
    (
        Store("ours", "gear_values", "ours", OF_IMAGES),
        Store("DataLoader, files", "plain_values", "DataLoader, files"),
        Store("LeRobot", "lerobot", "LeRobot"),
        Store("Lance", "lance", "Lance"),
        Store("WebDataset", "webdataset", "WebDataset"),
        Store("ours, no codec", "gear_values", "ours, no codec", {"torch.save, decoded": 1.0}, shares=False),
        Store("torch.save, decoded", "plain_values", "torch.save, decoded"),
    ),
    ((64, 1),),
    16,
    "image",
    f"jpegs of {SIZE} x {SIZE}",
)
VIDEO = Part(
    "video",
    (
        Store("ours", "gear_values", "ours, video", {"LeRobot, torchcodec": 1.0, "LeRobot, PyAV": 1.0}),
        Store("LeRobot, torchcodec", "lerobot", "LeRobot, torchcodec"),
        Store("LeRobot, PyAV", "lerobot", "LeRobot, PyAV", shares=False),
    ),
    ((64, 1), (16, 4)),
    8,
    "frame",
    f"H.264 of {SIZE} x {SIZE}",
)
TOKENS = Part(
    "tokens",
    (
        Store("ours", "gear_values", "ours, tokens", OF_TOKENS),
        Store("plain torch", "plain_values", "plain torch"),
        Store("torch.nested", "plain_values", "torch.nested"),
        Store("Arrow", "lance", "Arrow"),
        Store("TransferQueue", "transferqueue", "TransferQueue", shares=False),
    ),
    ((8, 1), (32, 1), (128, 1)),
    40,
    "token",
    "sequences of 100 to 8,000",
)


@experiment("values", repeats=(1, 9), pause=0.1)
def command(session: Session, parts: Parts = None) -> None:
    """Jpegs, video and token sequences, beside LeRobot, Lance, WebDataset, Arrow and TransferQueue."""
    chosen = some_of(parts or ",".join(PARTS), PARTS, "--parts")
    session.configure(parts=chosen, size=SIZE, workers=WORKERS, readers=READERS, seed=SEED)
    parts_of = {part.name: part for part in (IMAGES, VIDEO, TOKENS)}
    columns_of = {"tokens": COLUMNS[:1] if session.quick else COLUMNS}
    settings = [(parts_of[name], columns) for name in chosen for columns in columns_of.get(name, (0,))]
    for part, columns in session.each("values", settings, lambda setting: str(setting[0].name)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            _measured(session, part, columns, Path(folder))


def _measured(session: Session, part: Part, columns: int, folder: Path) -> None:
    quick, label = session.quick, part.label
    if part is TOKENS:
        label = f"{label} in {columns} column{'s' if columns > 1 else ''}"
        large = _tokens(folder / "large", 64 if quick else 2000, columns)
        small = _tokens(folder / "small", 48, columns)
    elif part is VIDEO:
        large, small = _video(folder / "large", 2 if quick else 12), _video(folder / "small", 1)
    else:
        large = _images(folder / "large", 96 if quick else 1024)
        small = _images(folder / "small", 96)
    with _built(session, part, label, {"large": large, "small": small}) as built:
        for batch, window in part.settings:
            shown = f"{label}, batches of {batch}" + (f" x {window}" if window > 1 else "")
            each = built[0][2]["mean"] * batch * window
            variants = [
                _variant(session, part, store, process, (batch, window), each) for store, process, _ in built
            ]
            there = {variant.name for variant in variants}
            told = {"batch": batch, "window": window, "item": part.item, "columns": columns}
            references = sorted(there - {"ours", part.yardstick})
            session.compare(part.name, shown, variants, part.yardstick, told, references, unit="rows")
        amounts = [
            Amount("values", f"{part.name}: bytes stored", label, store.name, [told["stored"] / told["payload"]], UNIT,
                   {"columns": columns}, 1.05 if part is TOKENS and store.name == "ours" else None)
            for store, _, told in built if told["stored"]
        ]  # fmt: skip
        session.show_amounts([session.record(amount) for amount in amounts])
        for _, process, _ in built:
            process.ask("close")  # tables are mapped by nobody else
        read = [
            _read(session, part, label, columns, store, told["payload"], small, large)
            for store, _, told in built
            if store.shares and (store.name == "ours" or not quick)
        ]
        session.show_amounts([session.record(amount) for amount in read if amount is not None])


@contextlib.contextmanager
def _built(
    session: Session, part: Part, label: str, folders: Mapping[str, Path]
) -> Iterator[list[tuple[Store, PeerProcess, dict[str, Any]]]]:
    """The stores that could be filled, with their processes, and what these said of the large one."""
    launches = {store.name: (lambda store=store: store.launch(session)) for store in part.stores}
    required = [store.name for store in part.stores if store.required]
    with session.processes(launches, required) as processes, contextlib.ExitStack() as stack:
        built = []
        for store in part.stores:
            if (process := processes.get(store.name)) is None:
                continue

            def fill(store: Store = store, process: PeerProcess = process) -> dict[str, Any]:
                told = {}
                for folder in reversed(folders.values()):  # the large one stays open
                    told = process.ask("build", folder=str(folder), place=str(_place(folder, store)))
                    stack.callback(_removed, process, folder, store)
                return told

            with session.console.status(f"{label}: {store.name}"):
                told = session.attempt(f"{store.name}, {label}", fill, required=store.required)
            if told is not None:
                built.append((store, process, told))
        yield built


def _removed(process: PeerProcess, folder: Path, store: Store) -> None:
    with contextlib.suppress(Exception):
        process.ask("build", folder=str(folder), place=str(_place(folder, store)), fill=False)
        process.ask("remove")


def _place(folder: Path, store: Store) -> Path:
    return folder / "stores" / store.kind.replace(" ", "-").replace(",", "")


def _variant(
    session: Session, part: Part, store: Store, process: PeerProcess, setting: tuple[int, int], mean: float
) -> Variant:
    """A store; amounts are images, frames or tokens, of which a batch has so many on average."""
    told = {"batch": setting[0], "window": setting[1], "workers": WORKERS}
    count = 2 if session.quick else part.batches
    amount = round(mean)

    def measure() -> float:
        answer = process.ask("measure", **told, count=count, ahead=AHEAD)
        return float(answer["seconds"]) * count * amount / answer["items"]

    parameters = {} if store.required else {"peer": process.about}
    check = lambda: process.ask("check", **told)  # noqa: E731
    own = {"parameters": parameters, "targets": store.targets, "required": store.required}
    return Variant(store.name, measure, check, amount, count, **own)


def _read(
    session: Session,
    part: Part,
    label: str,
    columns: int,
    store: Store,
    payload: int,
    small: Path,
    large: Path,
) -> Amount | None:
    """The memory of processes that read a store, over the bytes that it was given."""
    stores = [[str(folder), str(_place(folder, store))] for folder in (small, large)]

    def measured() -> float:
        with contextlib.closing(store.launch(session)) as process:
            answer = process.ask(
                "readers", count=READERS, small=stores[0], large=stores[1], batch=8, window=1
            )
        return float(answer["bytes"]) / payload

    with session.console.status(f"{label}: readers of {store.name}"):
        value = session.attempt(f"readers of {store.name}, {label}", measured, required=store.required)
    if value is None:
        return None
    workload = f"{part.name}: PSS of {READERS} readers"
    goal = 1.1 if store.name == "ours" else None
    return Amount("values", workload, label, store.name, [value], UNIT, {"columns": columns}, goal)


# ---------------------------------------------------------------- what is stored


def _spec(folder: Path, **spec: Any) -> Path:
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


def _images(folder: Path, count: int) -> Path:
    """Jpegs, and what they are decoded to; see `benchmarks.peers.values.Data`."""
    import simplejpeg

    folder.mkdir()
    made = np.random.default_rng(SEED)
    each = [simplejpeg.encode_jpeg(photograph(made), 90, colorsubsampling="420") for _ in range(count)]
    ends = np.cumsum([len(blob) for blob in each])
    (folder / "blobs").write_bytes(b"".join(each))
    np.save(folder / "ends.npy", ends)
    np.save(folder / "expected.npy", np.stack([simplejpeg.decode_jpeg(blob) for blob in each]))
    return _spec(folder, kind="images", count=count, payload=int(ends[-1]))


def _video(folder: Path, clips: int) -> Path:
    """Clips as frames, as a file, and what they are decoded to."""
    folder.mkdir()
    made = np.random.default_rng(SEED)
    frames = np.concatenate([_clip(made) for _ in range(clips)])
    np.save(folder / "frames.npy", frames)
    blobs, expected = _encoded(frames)
    np.save(folder / "expected.npy", expected)
    _write_mp4(folder / "clips.mp4", blobs)
    told = {"count": len(frames), "payload": sum(map(len, blobs)), "steps": STEPS, "clips": clips}
    return _spec(folder, kind="video", key_frames=KEY_FRAMES, crf=CRF, **told)


def _clip(made: np.random.Generator) -> np.ndarray:
    """A photograph that moves by 2 pixels a frame, with noise."""
    still = photograph(made)
    frames = [np.roll(still, 2 * step, axis=1) for step in range(STEPS)]
    noise = made.integers(-3, 4, (STEPS, *still.shape), dtype=np.int16)
    return (np.stack(frames) + noise).clip(0, 255).astype(np.uint8)


def _encoded(frames: np.ndarray) -> tuple[list[bytes], np.ndarray]:
    """The packets of clips as a table has them, and the frames that they are decoded to."""
    import av

    from gear_loader.storage.video import Video

    codec = gear.Codec("video", key_frames=KEY_FRAMES, crf=CRF)
    column = gear.Column(torch.uint8, frames.shape[1:], codec=codec)
    assert column.ragged is not None
    assert column.ragged.coded is not None
    video, blobs, out = Video(av, column.ragged.coded), list[bytes](), np.empty_like(frames)
    for first in range(0, len(frames), KEY_FRAMES):
        group = video.encode(list(frames[first : first + KEY_FRAMES]))
        video.decode([memoryview(blob) for blob in group], list(out[first : first + KEY_FRAMES]))
        blobs += [blob[4:] for blob in group]  # behind the value's own header
    return blobs, out


def _write_mp4(file: Path, packets: list[bytes]) -> None:
    """A file of packets of H.264, at 30 a second."""
    import av

    raw = file.with_suffix(".h264")
    raw.write_bytes(b"".join(packets))
    with av.open(str(raw)) as source, av.open(str(file), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        stream.time_base = fractions.Fraction(1, 15360)
        number = itertools.count()
        for packet in source.demux(video=0):
            if packet.size:
                packet.pts = packet.dts = 512 * next(number)
                packet.time_base, packet.duration = stream.time_base, 512
                packet.stream = stream
                target.mux(packet)
    raw.unlink()


def _tokens(folder: Path, count: int, columns: int) -> Path:
    """Lengths of sequences."""
    folder.mkdir()
    random = np.random.default_rng(SEED)
    lengths = np.clip(random.lognormal(math.log(MEDIAN), SIGMA, count), SHORTEST, LONGEST).astype(np.int64)
    np.save(folder / "lengths.npy", lengths)
    payload = 4 * columns * int(lengths.sum())
    return _spec(folder, kind="tokens", count=count, columns=columns, payload=payload)


def photograph(made: np.random.Generator) -> np.ndarray:
    """Noise whose amplitude falls as that of photographs does, uint8 [SIZE, SIZE, 3]."""
    rates = np.hypot(np.fft.fftfreq(SIZE)[:, None], np.fft.rfftfreq(SIZE))
    noise = np.fft.rfft2(made.standard_normal((3, SIZE, SIZE))) / np.maximum(rates, 1 / SIZE)
    layers = np.fft.irfft2(noise, s=(SIZE, SIZE))
    mixed = layers[:1] + 0.3 * layers  # colours vary less than brightness
    return np.ascontiguousarray(
        (128 + 50 * mixed / mixed.std()).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    )

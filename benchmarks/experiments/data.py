"""``python -m benchmarks data``: from a data set on disk, or in a bucket, to batches, beside what users would pick.

Data sets are written here by the owners of their formats: ``pusht`` (2 cameras of 96 x 96, drawn) and ``aloha`` (2
cameras of 480 x 640, photographs that move) by LeRobot, with images and with video as its tools have them; ``d4rl`` by
h5py; ``numbers``, 10^7 steps in Parquet, by pyarrow; ``texts``, 100,000 episodes of one step, by Hugging Face datasets.
``bucket`` (2 MB) and ``bucket-large`` (photographs, 100 MB): Parquet with images, as LeRobot's, on moto's S3 server,
each of whose requests takes 20 ms.

Each store is a process of its own, which opens it, with nothing cached but by the kernel, and makes passes of random
samples: by two processes of `DataLoader`, or two threads. LeRobot, Lance and Hugging Face read what is there, or what
their own tools wrote of it; WebDataset has tars, Streaming its MDS. What is delivered is compared with what was stored.

A turn is: open, a pass, another pass. Figures: samples a second of the later pass; seconds from opening to the first
batch; samples a second from opening to the end of the first pass; processor time of both, which other programs
on the machine change least. In a bucket what is compared is the first pass. Large data sets have passes of a
part: `Part.passes` batches. Then the sum of the PSS of 1, 2 and 4 processes that read the same.

See `benchmarks/peers/data.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments.values import photograph
from benchmarks.harness import Amount, Medians, Session, Variant
from benchmarks.options import experiment, option, some_of
from benchmarks.peers.process import PeerProcess, start

SEED, WORKERS, LATER, LATENCY = 3, 2, 1, 0.02
READERS = (1, 2, 4)
QUICK = 4
"""Batches of a pass of a small data set."""
OWN = ("gear", "plain")
IMAGES = {"LeRobot": 5.0}


@dataclasses.dataclass(frozen=True)
class Part:
    """A data set. kind: of `benchmarks.peers.data.Data`. maker: library and variant that write it. stores: name ->
    library. sizes: of `_written`; with ``--quick``, and usually. passes: batches of a pass. targets: of ours, and of
    which way."""

    name: str
    label: str
    kind: str
    maker: tuple[str, str]
    stores: Mapping[str, str]
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    batch: int
    passes: int
    targets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    best: str = "ours"
    slack: float = 0.0

    @property
    def in_bucket(self) -> bool:
        """Whether it lies in a bucket."""
        return self.name.startswith("bucket")

    @property
    def own(self) -> tuple[str, ...]:
        """The variants of this project."""
        return tuple(name for name, library in self.stores.items() if library.startswith("gear"))


OURS = {"ours": "gear_data", "ours, in the background": "gear_data"}
DECODED = {"ours": "gear_data", "ours, decoded": "gear_data"}
PEERS = {
    "Hugging Face": "plain_data",
    "WebDataset": "webdataset",
    "MosaicML Streaming": "streaming",
    "Lance": "lance",
}
VIDEO = {"LeRobot, torchcodec": "lerobot", "LeRobot, PyAV": "lerobot"}
ROBOT = ("robot", ("lerobot", "LeRobot"), {**DECODED, "LeRobot": "lerobot", **PEERS})
FILMED = ("robot", ("lerobot", "LeRobot, PyAV"), {**DECODED, **VIDEO})
MEMORY = {"ours": "gear_data", "DataLoader, in memory": "plain_data", **PEERS}
FEW = {**OURS, "Hugging Face": "plain_data", "Lance": "lance"}
STREAMED = {**OURS, "MosaicML Streaming": "streaming"}
PUSHT, ALOHA = ((2, 64, 96, 96), (10, 100, 96, 96)), ((2, 16, 480, 640), (2, 50, 480, 640))
PARTS = (
    Part("pusht", "pusht, images", *ROBOT, PUSHT, 32, 31, IMAGES, "ours, decoded"),
    Part("pusht-video", "pusht, video", *FILMED, PUSHT, 32, 31, dict.fromkeys(VIDEO, 5.0), "ours, decoded", 12),
    Part("aloha", "aloha, images", *ROBOT, ALOHA, 8, 12, IMAGES, "ours, decoded"),
    Part("aloha-video", "aloha, video", *FILMED, ALOHA, 8, 12, dict.fromkeys(VIDEO, 5.0), "ours, decoded", 12),
    Part("d4rl", "D4RL, 200,000 steps", "numbers", ("plain_data", "hdf5"), MEMORY,
         ((4, 500), (200, 1000)), 256, 40),
    Part("numbers", "10,000,000 steps in Parquet", "numbers", ("plain_data", "parquet"), FEW,
         ((4, 2000), (10_000, 1000)), 1024, 200),
    Part("texts", "100,000 texts", "texts", ("plain_data", "texts"), {**OURS, **PEERS},
         ((500, 1), (100_000, 1)), 64, 200),
    Part("bucket", "images in a bucket, 20 ms a request", "robot", ("plain_data", "frames"), STREAMED,
         ((8, 16, 96, 96), (20, 100, 96, 96)), 32, 62, {"MosaicML Streaming": 1.0}),
    Part("bucket-large", "photographs in a bucket, 20 ms a request", "robot", ("plain_data", "frames"), STREAMED,
         ((8, 16, 224, 224), (16, 32, 224, 224)), 32, 16, {"MosaicML Streaming": 1.0}),
)  # fmt: skip
NAMES = tuple(part.name for part in PARTS)
Parts = option(str, f"Some of {','.join(NAMES)}; all by default.")
FIGURES = ("speed", "memory")
Figures = option(str, f"Some of {','.join(FIGURES)}; both by default.")


@experiment("data", repeats=(1, 3), pause=0.1)
def command(session: Session, parts: Parts = None, figures: Figures = None) -> None:
    """Data sets from a disk and a bucket, beside LeRobot, Hugging Face, WebDataset, Streaming and Lance."""
    chosen = some_of(parts or ",".join(NAMES), NAMES, "--parts")
    measured = some_of(figures or ",".join(FIGURES), FIGURES, "--figures")
    session.configure(parts=chosen, figures=measured, workers=WORKERS, readers=list(READERS), seed=SEED)
    wanted = [part for part in PARTS if part.name in chosen]
    for part in session.each("data", wanted, lambda part: str(part.label)):
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            contextlib.ExitStack() as stack,
        ):
            where = Path(folder) / "data"
            address = ""
            if part.in_bucket:
                address = session.attempt(part.label, functools.partial(stack.enter_context, _bucket()))
            if address is None:
                continue
            most = QUICK if session.quick else part.passes
            small = Path(folder) / "small"
            _written(small, part, part.sizes[0], QUICK * part.batch, address)
            _written(where, part, part.sizes[not session.quick], most * part.batch, address)
            _measured(session, part, where, small, most, address, measured)


def _launch(session: Session, library: str, variant: str) -> PeerProcess:
    return start(session.peers, "data", library, variant, session.threads, patience=900.0)


def _place(folder: Path, name: str) -> Path:
    return folder / "stores" / name.replace(" ", "-").replace(",", "")


def _measured(
    session: Session, part: Part, folder: Path, small: Path, most: int, address: str, figures: list[str]
) -> None:
    with contextlib.ExitStack() as stack:

        def made() -> dict[str, Any]:
            process = stack.enter_context(contextlib.closing(_launch(session, *part.maker)))
            for each in (small, folder):
                process.ask("build", folder=str(each), place=str(each / "maker"))
            return {}

        with session.console.status(f"{part.label}: made by {part.maker[0]}"):
            if session.attempt(f"{part.label}, which {part.maker[0]} makes", made) is None:
                return
    if address:
        _upload(folder / "made", f"{address}/made")
    launches = {name: functools.partial(_launch, session, lib, name) for name, lib in part.stores.items()}
    with session.processes(launches, part.own) as processes:
        for name in list(processes):

            def filled(name: str = name) -> dict[str, Any]:
                for each in (small, folder):
                    processes[name].ask("build", folder=str(each), place=str(_place(each, name)))
                if address and name not in part.own:
                    _upload(_place(folder, name), f"{address}/streaming")
                return {}

            with session.console.status(f"{part.label}: {name}"):
                if session.attempt(f"{name}, {part.label}", filled, required=name in part.own) is None:
                    del processes[name]
        variants = [_variant(session, part, name, process, most) for name, process in processes.items()]
        references = [name for name in processes if name != "ours"]
        told = {"batch": part.batch, "passes": most, "item": "sample"}
        if "speed" in figures:
            session.compare(part.name, part.label, variants, "ours", told, references, unit="rows")
        there = set(processes)
    if not part.in_bucket and "memory" in figures:
        _memory(session, part, folder, small, there, most)


def _variant(session: Session, part: Part, name: str, process: PeerProcess, most: int) -> Variant:
    """A store. What is timed is its later passes, from a bucket opening it and the first."""
    told: dict[str, Any] = {"batch": part.batch, "workers": WORKERS, "passes": most}
    figures, count = Medians(), most if part.in_bucket else most * LATER

    def measure() -> float:
        answer = process.ask("measure", **told, later=LATER)
        later, first = answer["seconds"] / LATER, answer["first"]
        rates = {
            "first_pass_per_s": most * part.batch / first,
            "later_passes_per_s": most * part.batch / later,
        }
        used = {
            "processor_first_s": answer["processor_first"],
            "processor_us_per_sample": 1e6 * answer["processor"] / (LATER * most * part.batch),
        }
        figures.note(first_batch_s=answer["first_batch"], **rates, **used)
        return float(first if part.in_bucket else answer["seconds"])

    parameters = {} if name in part.own else {"peer": process.about}
    return Variant(
        name,
        measure,
        lambda: process.ask("check", **told) and None,
        part.batch,
        count,
        parameters,
        part.targets if name == part.best else {},
        figures,
        required=name in part.own,
    )


def _memory(session: Session, part: Part, folder: Path, small: Path, there: set[str], most: int) -> None:
    """The memory of processes that read the same."""
    amounts = []
    for name, library in part.stores.items():
        if name not in there or (session.quick and name != "ours") or name == "ours, in the background":
            continue
        for count in READERS[: 2 if session.quick else None]:

            def measured(name: str = name, library: str = library, count: int = count) -> float:
                first, large = ([str(each), str(_place(each, name))] for each in (small, folder))
                with contextlib.closing(_launch(session, library, name)) as process:
                    process.ask("open", folder=large[0], place=large[1])
                    answer = process.ask("readers", count=count, small=first, batch=part.batch, passes=most)
                return float(answer["bytes"]) / 2**20

            what = f"{count} readers of {name}, {part.label}"
            with session.console.status(what):
                value = session.attempt(what, measured, required=name in part.own)
            if value is not None:
                label = f"{part.label}: PSS of {count} reader{'s' if count > 1 else ''}"
                workload = f"{part.name}: PSS of readers"
                told = {"readers": count}
                amounts.append(session.record(Amount("data", workload, label, name, [value], "MiB", told)))
    for count in READERS:
        session.show_amounts([amount for amount in amounts if amount.parameters["readers"] == count])


# ---------------------------------------------------------------- what is stored


def _written(folder: Path, part: Part, sizes: tuple[int, ...], least: int, address: str) -> None:
    """What is in a data set; see `benchmarks.peers.data.Data`. sizes: episodes, steps, height and width of images."""
    folder.mkdir()
    (episodes, steps), random = sizes[:2], np.random.default_rng(SEED)
    lengths = np.full(episodes, steps)
    if part.kind == "numbers":
        lengths += random.integers(-steps // 10, steps // 10 + 1, episodes)
        lengths[-1] += episodes * steps - lengths.sum()
    count = int(lengths.sum())
    payload = 0
    if part.kind == "texts":
        words = ["".join(map(chr, random.integers(97, 123, length))) for length in random.integers(2, 9, 500)]
        picked = random.integers(500, size=(count, 2, 24))
        texts = [[" ".join(words[i] for i in half) for half in each] for each in picked.tolist()]
        (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        payload = sum(len(half) for each in texts for half in each)
    else:
        widths = {"state": 14, "action": 14} if part.kind == "robot" else {"observations": 17, "actions": 6}
        arrays = {name: random.random((count, width), np.float32) for name, width in widths.items()}
        if part.kind == "robot":
            arrays |= {name: _film(random, episodes, steps, sizes[2:]) for name in ("top", "wrist")}
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)
            payload += values.nbytes
    assert count >= least, (part.name, count, least)
    told = {"kind": part.kind, "lengths": lengths.tolist(), "count": count, "payload": payload}
    spec = json.dumps({**told, "slack": part.slack, "address": address})
    (folder / "spec.json").write_text(spec, encoding="utf-8")


def _film(random: np.random.Generator, episodes: int, steps: int, size: tuple[int, ...]) -> np.ndarray:
    """Small images like pusht's, a grey bar and a disk on white; large ones like photographs that move."""
    height, width = size
    frames = np.empty((episodes, steps, height, width, 3), dtype=np.uint8)
    rows, columns = np.ogrid[:height, :width]
    for episode in range(episodes):
        if height >= 224:
            still = np.tile(photograph(random), (-(-height // 224), -(-width // 224), 1))[:height, :width]
            for step in range(steps):
                frames[episode, step] = np.roll(still, 2 * step, axis=1)
            continue
        frames[episode] = 255
        path = random.random((2, 2)) * height
        for step in range(steps):
            y, x = path[0] + (path[1] - path[0]) * step / steps
            frames[episode, step, height // 3 : height // 2, int(x) // 2 : int(x) // 2 + width // 4] = 119
            frames[episode, step][(rows - y) ** 2 + (columns - x) ** 2 < (height / 14) ** 2] = (65, 105, 225)
    return frames.reshape(-1, height, width, 3)


@contextlib.contextmanager
def _bucket() -> Iterator[str]:
    """An address in a store that is served meanwhile; processes that are started now find it."""
    import moto  # noqa: F401
    import s3fs  # noqa: F401

    script = Path(__file__).parents[1] / "peers" / "bucket.py"
    command = [sys.executable, "-I", str(script), str(LATENCY)]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(command, **pipes) as server:
        before = dict(os.environ)
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            told = {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
            os.environ |= {**told, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
            _system().mkdir("bench")
            yield "s3://bench"
        finally:
            os.environ.clear()
            os.environ.update(before)
            server.kill()


def _system() -> Any:
    import fsspec

    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def _upload(folder: Path, address: str) -> None:
    """Copy the files of a folder."""
    system = _system()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            system.put(str(file), f"{address}/{file.relative_to(folder)}")

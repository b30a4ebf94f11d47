"""Columns with a codec: what was added is decoded, what is damaged is refused or named, and nothing else changes."""

from __future__ import annotations

import io
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from cases import amounts
from tier_common import spill, tiered
from torchvision_common import substitute_torchvision

import gear_loader as gear
from gear_loader.errors import CodecError, SchemaError
from gear_loader.storage import coders, decoding
from gear_loader.storage.codecs import Coded
from gear_loader.storage.decoding import decoded, encoded

for package in ("simplejpeg", "PIL", "zstandard", "lz4"):
    pytest.importorskip(package)

H, W = 24, 40
COLUMNS = {
    "jpeg": gear.Column(torch.uint8, (H, W, 3), codec="jpeg"),
    "gray": gear.Column(torch.uint8, (H, W, 1), codec=gear.Codec("jpeg", quality=95)),
    "png": gear.Column(torch.uint8, (H, W, 4), codec="png"),
    "sizes": gear.Column(torch.uint8, (None, None, 1), codec=gear.Codec("png", level=9)),
    "webp": gear.Column(torch.uint8, (H, W, 3), codec="webp"),
    "lossy": gear.Column(torch.uint8, (H, W, 3), codec=gear.Codec("webp", quality=95)),
    "alpha": gear.Column(torch.uint8, (H, W, 4), codec="webp"),
    "zstd": gear.Column(torch.bfloat16, (3, 2), codec="zstd"),
    "rows": gear.Column(torch.float32, (None, 2), codec="zstd"),
    "lz4": gear.Column(torch.bool, (70,), codec="lz4"),
    "one": gear.Column(torch.int64, codec="lz4"),
    "goal": gear.Column(torch.uint8, (H, W, 3), per="trajectory", codec="png"),
    "reward": gear.Column(torch.float32),
}
LOSSY = {"jpeg": 16, "gray": 6, "lossy": 16}
SIZES: dict[str, Any] = {"max_steps": 200, "max_trajectories": 20, "block_steps": 4}


def table_of(columns: Any = COLUMNS, payload: int | str = "4MiB", **options: Any) -> gear.Table:
    return gear.Table.create(columns, memory=gear.Memory(payload=payload), **{**SIZES, **options})


def picture(random: np.random.Generator, height: int, width: int, channels: int) -> np.ndarray[Any, Any]:
    """A smooth one, which lossy codecs keep well."""
    y, x, c = np.ogrid[:height, :width, :channels]
    a, b, d = random.uniform(0.02, 0.2, 3)
    return np.ascontiguousarray((128 + 100 * np.sin(a * y + b * x + d * c)).astype(np.uint8))


def trajectory(random: np.random.Generator, length: int) -> dict[str, Any]:
    sizes = random.integers(1, 30, (length, 2))
    rows: dict[str, Any] = {
        name: np.stack([picture(random, *column.ragged.coded.shape) for _ in range(length)])
        for name, column in COLUMNS.items()
        if name in ("jpeg", "gray", "png", "webp", "lossy", "alpha")
    }
    rows["alpha"][::2, :, :, 3] = 255  # opaque: what webp leaves away
    rows["alpha"][1::2, :, :, 3] = 0  # of invisible pixels, too, the colours are kept
    rows["lossy"] = torch.from_numpy(rows["lossy"])
    return rows | {
        "sizes": [picture(random, *size, 1) for size in sizes.tolist()],
        "zstd": torch.from_numpy(random.random((length, 3, 2))).to(torch.bfloat16),
        "rows": [random.random((n, 4), np.float32)[:, ::2] for n in random.integers(0, 9, length)],
        "lz4": [torch.from_numpy(random.random(70) < 0.5) for _ in range(length)],
        "one": random.integers(0, 9, length),
        "goal": picture(random, H, W, 3),
        "reward": np.arange(length, dtype=np.float32),
    }


def check(name: str, found: Any, expected: Any) -> None:
    one, other = torch.as_tensor(found), torch.as_tensor(expected)
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    if name in LOSSY:
        assert (one.float() - other.float()).abs().max() <= LOSSY[name]
    else:
        assert (one == other).all()


def test_what_was_added_is_decoded() -> None:
    random = np.random.default_rng(0)
    added = [trajectory(random, n) for n in (5, 1, 9)]
    with table_of() as table:
        slots = [table.add(added[0]), *table.extend(added[1:]).tolist()]
        table.check_valid()
        known = dict(zip(slots, added, strict=True))
        for slot, expected in known.items():
            found = table[slot]
            for name in COLUMNS:
                if isinstance(expected[name], list):
                    for one, other in zip(list(found[name]), expected[name], strict=True):
                        check(name, one, other)
                else:
                    check(name, found[name], expected[name])
        windows: dict[str, Any] = {name: gear.Window(3, -1) for name in COLUMNS} | {"goal": None}
        windows |= {"before": gear.Window(2, -2, pad="edge", column="png")}
        dataset = gear.ReplayDataset(table, batch_size=16, device="cpu", windows=windows)
        for batch, _ in zip(dataset, range(3), strict=False):
            assert batch["png"].shape == (16, 3, H, W, 4)
            assert batch["rows"].shape == (16, 3)
            for row, (slot, anchor) in enumerate(
                zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True)
            ):
                expected = known[slot]
                check("goal", batch["goal"][row], expected["goal"])
                for step, at in zip(range(anchor - 2, anchor), range(2), strict=True):
                    check("png", batch["before"][row, at], expected["png"][max(step, 0)])
                for at, step in enumerate(range(anchor - 1, anchor + 2)):
                    for name in sorted(COLUMNS.keys() - {"goal"}):
                        value = batch[name][row][at] if name == "sizes" else batch[name][row, at]
                        if 0 <= step < len(expected["reward"]):
                            check(name, value, expected[name][step])
                        else:
                            assert not value.any()
        packed = gear.ReplayDataset(
            table, batch_size=4, device="cpu", windows=gear.Whole(), layout="packed"
        ).sample()
        for row, slot in enumerate(packed["index"].tolist()):
            begin, end = packed["cu_seqlens"][row : row + 2].tolist()
            for name in ("webp", "one"):
                check(name, packed[name][begin:end], known[slot][name])


def test_values_that_are_encoded_already_are_stored_as_they_are() -> None:
    random = np.random.default_rng(1)
    rows = trajectory(random, 3)
    with table_of() as table:
        blobs = {}
        for name, column in COLUMNS.items():
            if column.codec is not None and name != "goal":
                coder = coders.coder_of(column.ragged.coded)
                arrays = [np.ascontiguousarray(each) for each in rows[name]] if name != "zstd" else []
                blobs[name] = [coder.encode(each) for each in arrays] or list(rows[name])
        expected, found = table[table.add(rows)], table[table.add({**rows, **blobs})]
        for name in COLUMNS:
            for one, other in zip(list(found[name]), list(expected[name]), strict=True):
                assert torch.equal(one, other)


def test_decoded_tensors_are_padded_and_shown_as_others_are() -> None:
    names = ["webp", "one", "reward"]
    rows = [trajectory(np.random.default_rng(5), n) for n in (2, 5)]
    with table_of({name: COLUMNS[name] for name in names}) as table:
        table.extend([{name: row[name] for name in names} for row in rows])
        options: dict[str, Any] = {"batch_size": 2, "device": "cpu", "windows": gear.Whole()}
        options["sampler"] = gear.Uniform(replacement=False)
        padded = gear.ReplayDataset(table, **options).sample()
        jagged = gear.ReplayDataset(table, layout="jagged", **options).sample()
        for batch, place in ((padded, None), (jagged, 0)):
            for row, slot in enumerate(batch["index"].tolist()):
                values = batch["webp"][row] if place is None else batch["webp"].unbind()[row]
                length = len(rows[slot]["reward"])
                check("webp", values[:length], rows[slot]["webp"])
                assert not values[length:].any()


def test_checkpoints_keep_what_is_encoded(tmp_path: Any) -> None:
    with table_of() as table:
        table.extend([trajectory(np.random.default_rng(4), n) for n in (3, 7)])
        table.save(tmp_path)
        with gear.Table.load(tmp_path) as loaded:
            for slot in (0, 1):
                expected, found = table[slot], loaded[slot]
                for name in COLUMNS:
                    for one, other in zip(list(found[name]), list(expected[name]), strict=True):
                        assert torch.equal(one, other), name


def spilled(table: gear.Table, path: Any) -> None:
    """Move all trajectories of a table with a tier to disk."""
    table.save(path)
    assert spill(table, table.indices()) == len(table)


def png_of(height: int, width: int) -> bytes:
    """A header that promises an image."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def other(name: Any, shape: tuple[int, ...]) -> bytes:
    random = np.random.default_rng(0)
    return coders.coder_of(Coded(gear.Codec(name), "uint8", shape)).encode(
        random.integers(0, 99, shape, np.uint8)
    )


def saved(mode: str, kind: str) -> bytes:
    image, memory = pytest.importorskip("PIL.Image"), io.BytesIO()
    image.new(mode, (W, H)).save(memory, kind)
    return memory.getvalue()


REFUSED: list[tuple[str, Any, str]] = [
    (
        "jpeg",
        np.zeros((2, H, W), np.uint8),
        r"step 0, is an array of shape \[24, 40\]; expected \[24, 40, 3\]",
    ),
    (
        "jpeg",
        torch.zeros(2, H, W, 3),
        r"step 0, is torch.float32 \[24, 40, 3\]; expected an array or a tensor of",
    ),
    ("jpeg", b"ab", "Column 'jpeg' of trajectory 0 is b'ab'; expected a list with an array"),
    (
        "jpeg",
        [np.zeros((H, W, 3), np.uint8), "x"],
        "Column 'jpeg' of trajectory 0, step 1, is str; expected an array",
    ),
    ("jpeg", [b""] * 2, r"step 0, is 0 bytes that are no jpeg of torch.uint8 \[24, 40, 3\]: "),
    ("jpeg", [other("jpeg", (H, W, 3))[:30]] * 2, "step 0, is 30 bytes that are no jpeg"),
    ("jpeg", [other("png", (H, W, 3))] * 2, "that are no jpeg"),
    ("jpeg", [other("jpeg", (H, W + 1, 3))] * 2, r"shape \[24, 41, 3\]; expected \[24, 40, 3\]"),
    ("gray", [other("jpeg", (H, W, 3))] * 2, r"shape \[24, 40, 3\]; expected \[24, 40, 1\]"),
    ("jpeg", [saved("CMYK", "jpeg")] * 2, "a jpeg of the colours .*; expected Gray, YCbCr or RGB"),
    (
        "png",
        [saved("P", "png")] * 2,
        "a png of . bits and colour type 3; expected 8 bits, and gray, RGB or RGBA",
    ),
    ("png", [saved("I;16", "png")] * 2, "a png of 16 bits"),
    (
        "sizes",
        [png_of(2**31 - 1, 2**31 - 1)] * 2,
        r"shape \[2147483647, 2147483647, 3\]; expected \[None, None, 1\]",
    ),
    ("webp", [other("webp", (H, W, 3))[:29]] * 2, "no webp"),
    ("goal", [other("png", (H, W, 3))], "Column 'goal' of trajectory 0 is list; expected an array"),
    (
        "goal",
        other("png", (H, W, 4)),
        r"Column 'goal' of trajectory 0 is .* bytes that are no png .*\[24, 40, 4\]",
    ),
    ("zstd", [other("zstd", (13,))] * 2, "13 bytes; expected 12"),
    ("rows", [other("zstd", (9,))] * 2, "9 bytes; expected a multiple of 8"),
    ("zstd", [other("lz4", (12,))] * 2, "no zstd frame"),
    ("lz4", [other("zstd", (70,))] * 2, "no lz4 frame"),
]


def test_values_that_are_refused_change_nothing() -> None:
    rows = trajectory(np.random.default_rng(0), 2)
    with table_of() as table:
        for name, value, message in REFUSED:
            with pytest.raises(SchemaError, match=message):
                table.add({**rows, name: value})
        assert len(table) == 0
        table.check_valid()


def test_decoded_sizes_are_limited() -> None:
    columns = {
        "image": gear.Column(torch.uint8, (None, None, 3), codec=gear.Codec("png", max_bytes="1KiB")),
        "rows": gear.Column(torch.uint8, (None,), codec=gear.Codec("lz4", max_bytes=1024)),
    }
    with table_of(columns) as table:
        small = {"image": [np.zeros((18, 18, 3), np.uint8)], "rows": [other("lz4", (1024,))]}
        table.add(small)
        for name, large in (("image", png_of(2**31 - 1, 2**31 - 1)), ("rows", other("lz4", (1 << 20,)))):
            with pytest.raises(SchemaError, match="expected at most 1,024, the codec's max_bytes"):
                table.add({**small, name: [large]})
        lz4 = pytest.importorskip("lz4.frame")
        context = lz4.LZ4FrameCompressor()
        stream = context.begin() + context.compress(b"abc") + context.flush()
        with pytest.raises(SchemaError, match="an lz4 frame whose header lacks the decoded size"):
            table.add({**small, "rows": [stream]})
        empty = lz4.compress(b"", store_size=False)
        assert len(table[table.add({**small, "rows": [empty]})]["rows"][0]) == 0
        assert len(table) == 2


@pytest.mark.parametrize("name", ["jpeg", "png", "webp"])
def test_images_that_a_format_does_not_have(name: Any) -> None:
    columns = {"image": gear.Column(torch.uint8, (None, None, 3), codec=name)}
    with table_of(columns) as table:
        for shape in ((0, 4, 3), (4, 0, 3)):
            with pytest.raises(SchemaError, match=r"step 0, is an array of shape .* at least one pixel"):
                table.add({"image": [np.zeros(shape, np.uint8)]})
        if name != "png":
            with pytest.raises(SchemaError, match=rf"step 0, .* which cannot be encoded as {name}: "):
                table.add({"image": [np.zeros((1, 66_000, 3), np.uint8)]})
        assert len(table) == 0


def test_what_pillow_takes_for_a_bomb_is_limited_by_the_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("PIL.Image"), "MAX_IMAGE_PIXELS", 100)
    image = np.full((H, W, 3), 7, np.uint8)
    with table_of({"png": gear.Column(torch.uint8, (H, W, 3), codec="png")}) as table:
        assert (table[table.add({"png": image[None]})]["png"] == 7).all()


def test_helpers_are_waited_for_where_no_more_threads_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    main, start, started, done = threading.current_thread(), threading.Thread.start, [], list[int]()

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def work(i: int) -> None:
        time.sleep(0.01 if threading.current_thread() is main else 0.5)
        done.append(i)

    with ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(decoding, "_threads", lambda: 4)
        monkeypatch.setattr(decoding, "_pool", lambda pid, members: pool)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        decoding.for_each(8, work)
        assert sorted(done) == list(range(8))


@pytest.mark.parametrize("name", ["jpeg", "gray"])
def test_jpegs_that_a_gpu_decodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for torchvision. What it refuses, and what is no such jpeg, is left to the CPU, which names it."""
    asked = substitute_torchvision(monkeypatch)
    coded, device = COLUMNS[name].ragged.coded, torch.device("cpu")  # type: ignore[union-attr]
    assert coded is not None
    values = trajectory(np.random.default_rng(3), 3)[name]
    first, second = (memoryview(blob) for blob in encoded(coded, values[:2], "it", once=False, whole=True))
    plain = lambda blobs, shape: decoded(coded, blobs, shape, name=lambda i: f"value {i}")  # noqa: E731
    found = lambda blobs, shape: decoded(coded, blobs, shape, name=lambda i: f"value {i}", device=device)  # noqa: E731
    for blobs in ([first, second], [second, None, first, second], [None, None]):
        assert torch.equal(found(blobs, (len(blobs), 1)), plain(blobs, (len(blobs), 1)))
    assert asked == [2, 2]  # once each, and not for nothing
    other = memoryview(coders.coder_of(coded).encode(np.zeros((H, W + 8, coded.row_shape[2]), np.uint8)))
    for damaged in (memoryview(bytes(first)[:-40]), memoryview(b"no jpeg"), other):
        with pytest.raises(CodecError, match="value 1 is damaged"):
            found([first, damaged], (2,))
    assert asked == [2, 2, 2]


@pytest.mark.parametrize("tier", [False, True])
def test_damaged_values_are_named_and_the_table_stays_whole(tier: bool, tmp_path: Any) -> None:
    names, shape = ("jpeg", "webp"), (H, W, 3)
    columns = {name: COLUMNS[name] for name in (*names, "reward")}
    rows = {name: value for name, value in trajectory(np.random.default_rng(2), 3).items() if name in columns}
    damaged = {name: [rows[name][0], other(name, shape)[:-30], rows[name][2]] for name in names}
    with tiered(tmp_path, columns, payload="1MiB") if tier else table_of(columns) as table:
        table.add(rows)
        slots = [table.add({**rows, name: damaged[name]}) for name in names]
        if tier:
            spilled(table, tmp_path)
        for slot, name in zip(slots, names, strict=True):
            message = (
                f"Column '{name}' of trajectory {slot}, step 1, is damaged, and cannot be decoded as {name}: "
            )
            with pytest.raises(CodecError, match=message):
                table[slot]
            with pytest.raises(CodecError, match=message):
                table.gather([0, slot], [0, 0], windows={name: gear.Window(3)})
            assert table.gather([0, slot], [0, 0], windows={name: gear.Window(1)})[name].any()
        table.check_valid()
        assert table._engine.num_spilled == 3 * tier
        table.remove(slots)
        dataset = gear.ReplayDataset(table, batch_size=8, device="cpu", windows={"webp": gear.Window(1)})
        assert dataset.sample()["webp"].shape == (8, 1, *shape)
    verified = {name: gear.Column(torch.uint8, shape, codec=gear.Codec(name, verify=True)) for name in names}
    with table_of({**columns, **verified}) as table:
        for name in names:
            with pytest.raises(
                SchemaError, match=f"Column '{name}' of trajectory 0, step 1, is .* no {name}"
            ):
                table.add({**rows, name: damaged[name]})


def encoded_values(random: np.random.Generator) -> dict[str, list[bytes]]:
    """Whole ones, by column."""
    rows, found = trajectory(random, 4), {}
    for name in sorted(COLUMNS.keys() - {"goal", "zstd", "reward"}):
        coder = coders.coder_of(COLUMNS[name].ragged.coded)  # type: ignore[union-attr]
        found[name] = [coder.encode(np.ascontiguousarray(each)) for each in rows[name]]
    return found


def test_mutated_values_in_a_table() -> None:
    """Each is refused, or read as a value of the declared shape, or named as damaged."""
    random = np.random.default_rng(6)
    whole, seen = encoded_values(random), {"refused": 0, "damaged": 0, "read": 0}
    with table_of({name: COLUMNS[name] for name in whole}, on_full="evict_oldest") as table:
        for name in [*whole] * 40:
            values = {name: [blobs[0]] for name, blobs in whole.items()}
            values[name] = [mutated(random, whole[name])]
            try:
                slot = table.add(values)
            except SchemaError:
                seen["refused"] += 1
                continue
            try:
                found = table.gather([slot], windows={name: gear.Window(1)})[name]
            except CodecError as error:
                named = f"Column '{name}' of trajectory {slot}, step 0, is damaged" in str(error)
                seen["damaged" if named else "named wrongly"] += 1
            else:
                seen["read"] += len(found)
        table.check_valid()
    assert min(seen.values()) > 20, seen


@pytest.mark.parametrize("count", amounts(500, 10_000, 100_000, timeout=1500))
def test_mutated_values_never_end_the_process(count: int) -> None:
    random = np.random.default_rng(count)
    whole, seen = encoded_values(random), {"refused": 0, "damaged": 0, "read": 0}
    names = sorted(whole)
    for i in range(count):
        name = names[i % len(names)]
        coded = COLUMNS[name].ragged.coded  # type: ignore[union-attr]
        assert coded is not None
        try:
            (blob,) = encoded(coded, [mutated(random, whole[name])], "it", once=False, whole=True)
        except SchemaError:
            seen["refused"] += 1
            continue
        try:
            seen["read"] += len(decoded(coded, [memoryview(blob)], (1,), name=lambda _: "it"))
        except CodecError:
            seen["damaged"] += 1
    assert min(seen.values()) > count / 20, seen


def mutated(random: np.random.Generator, blobs: list[bytes]) -> bytes:
    blob = bytearray(blobs[int(random.integers(len(blobs)))])
    for _ in range(int(random.integers(1, 4))):
        head = 40 if random.random() < 0.5 else len(blob)
        at, kind = int(random.integers(min(head, len(blob)) or 1)), random.random()
        if kind < 0.5 and blob:
            blob[at % len(blob)] = int(random.choice([0, 255, 127, 128, random.integers(256)]))
        elif kind < 0.65:
            del blob[at:]
        elif kind < 0.75:
            del blob[at : at + int(random.integers(1, 9))]
        elif kind < 0.9:
            blob[at:at] = random.bytes(int(random.integers(1, 9)))
        else:
            tail = blobs[int(random.integers(len(blobs)))]
            blob[at:] = tail[int(random.integers(len(tail))) :]
    return bytes(blob)


def test_batches_are_right_while_others_evict() -> None:
    """Values are decoded where they lie, which stays as it is while a batch is read."""
    columns = {"x": gear.Column(torch.uint8, (64, 64, 3), codec="jpeg"), "y": gear.Column(torch.int64)}
    stop = threading.Event()

    def filled(shade: int) -> dict[str, Any]:
        return {"x": np.full((4, 64, 64, 3), shade, np.uint8), "y": np.full(4, shade)}

    with table_of(columns, 20_000, on_full="evict_oldest") as table:
        table.add(filled(0))

        def write() -> None:
            shade = 0
            while not stop.is_set():
                shade = (shade + 1) % 256
                table.add(filled(shade))

        thread = threading.Thread(target=write)
        thread.start()
        try:
            dataset = gear.ReplayDataset(
                table, batch_size=8, device="cpu", windows=gear.Window(2), batches_per_epoch=15
            )
            for batch in dataset:
                shades = batch["x"].to(torch.int64)
                assert ((shades - batch["y"][:, :, None, None, None]).abs() <= 1)[batch["mask"]].all()
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gear.Codec("gif"),
            "Codec name is 'gif'; expected 'jpeg', 'png', 'webp', 'zstd', 'lz4' or 'video'",
        ),  # type: ignore[arg-type]
        (lambda: gear.Codec("png", quality=90), "Codec 'png' was given quality=90; it has no quality"),
        (lambda: gear.Codec("jpeg", quality=0), "Codec quality is 0; expected 1 to 100 for 'jpeg'"),
        (
            lambda: gear.Column(torch.float32, (8, 8, 3), codec="png"),
            r"expected uint8 of shape \(h, w, 1\) or \(h, w, 3\)",
        ),
        (lambda: gear.Column(torch.uint8, (8, 8), codec="jpeg"), "expected uint8 of shape"),
        (
            lambda: gear.Column(torch.uint8, (8, None, 2), codec="zstd"),
            "has None as extent 1; expected it as the first",
        ),
        (
            lambda: gear.Column(torch.uint8, (8, 8, 3), codec="png", mutable=True),
            "has mutable=True; expected none of final",
        ),
        (
            lambda: gear.Column(str, codec="zstd"),
            r"Column\(str\) has codec=Codec\('zstd'\); expected none of text",
        ),
        (
            lambda: gear.Schema.from_json([["x", "uint8", [8], 'codec={"name":"zstd","path":"/"}']]),
            "which is not valid",
        ),
        (lambda: gear.Schema.from_json([["x", "uint8", [8], "codec=" + "[" * 10**5]]), "which is not valid"),
    ],
)
def test_codecs_that_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make()


def test_a_schema_keeps_its_codecs() -> None:
    schema = gear.Schema(COLUMNS)
    assert gear.Schema.from_json(schema.to_json()) == schema
    assert repr(schema["jpeg"]) == "Column(dtype=torch.uint8, shape=(24, 40, 3), codec='jpeg')"
    assert repr(schema["gray"].codec) == "Codec('jpeg', quality=95)"


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(coders._PACKAGES, "lz4", "gear_loader_no_such_package")
    column = gear.Column(torch.uint8, (17,), codec=gear.Codec("lz4", level=1))
    with pytest.raises(
        ImportError, match=r"codec='lz4' needs the package 'gear_loader_no_such_package'.*pip install"
    ):
        table_of({"x": column})


@pytest.mark.parametrize("n", [1, 2])
def test_steps_that_chunks_have_in_common_are_not_encoded_again(n: int) -> None:
    """Else they would differ, with a lossy codec."""
    random, options = np.random.default_rng(0), {"chunk_steps": 4, "overlap_steps": 2}
    columns = {name: COLUMNS[name] for name in ("jpeg", "zstd", "reward")}
    with table_of(columns) as table:
        make: Any = table.writer if n == 1 else lambda **given: table.writers(n, **given)
        writer = make(commit_every_step=True, **options)
        for step in range(10):
            jpeg = random.integers(0, 255, (n, H, W, 3), dtype=np.uint8)
            zstd = torch.full((n, 3, 2), step).bfloat16()
            rows = {"jpeg": jpeg, "zstd": zstd, "reward": np.full(n, step, dtype=np.float32)}
            writer.append({name: value[0] for name, value in rows.items()} if n == 1 else rows)
        found = [table[i] for i in table.indices().tolist()]
        assert len(found) == 4 * n
        for before, after in zip(found, found[n:], strict=False):
            for name in columns:
                assert all(map(torch.equal, before[name][2:], after[name][:2])), name
        table.check_valid()

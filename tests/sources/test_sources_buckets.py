"""Data sets at addresses: every format is what its copy on this machine is, and a store that fails is an error."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from forks_common import in_child
from sources_common import read_in_parts
from test_sources_demonstrations import write_robomimic, write_zarr

import gear_loader as gear
from gear_loader.errors import CodecError, SourceError
from gear_loader.sources import hdf5_file, source_files
from gear_loader.sources.named import registry
from gear_loader.storage.ragged import Ragged
from gear_loader.utils import addresses, remote_file

fsspec = pytest.importorskip("fsspec")
ROBOTS = Path(__file__).parents[1] / "data" / "robots"
ROOT = "memory://sources"


def write_hdf5(root: Path) -> str:
    random, steps = np.random.default_rng(0), 40
    with h5py.File(root / "d4rl.hdf5", "w") as file:
        file["observations"] = random.normal(size=(steps, 3)).astype(np.float32)
        file["actions"] = random.normal(size=(steps, 2)).astype(np.float32)
        file["rewards"] = random.normal(size=steps).astype(np.float32)
        file["terminals"] = np.arange(steps) % 10 == 9
        file["timeouts"] = np.arange(steps) % 20 == 4
        file.create_dataset(
            "infos/big", data=random.integers(0, 255, (steps, 5000), np.uint8), chunks=(7, 500)
        )
    return "hdf5:d4rl.hdf5"


def write_robomimic_file(root: Path) -> str:
    write_robomimic(root / "lift.hdf5", compression="gzip")
    return "robomimic:lift.hdf5"


def write_minari(root: Path) -> str:
    from test_sources_minari import buffer, build  # imports minari

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(root))
        build([buffer(length) for length in (3, 8, 1, 5)])
    return "minari:made-v0"


def write_zarr_group(root: Path, form: int) -> str:
    source = np.random.default_rng(form)
    arrays = {
        "action": (source.normal(size=(60, 2)).astype(np.float32), 7, True),
        "img/top": (source.integers(0, 255, (60, 4, 4, 3), np.uint8), 3, False),
    }
    write_zarr(root / "group.zarr", form, [10, 20, 5, 25], arrays)
    return "zarr:group.zarr"


def write_zarr2(root: Path) -> str:
    return write_zarr_group(root, 2)


def write_zarr3(root: Path) -> str:
    return write_zarr_group(root, 3)


def write_zarr_zip(root: Path) -> str:
    write_zarr_group(root, 3)
    shutil.make_archive(str(root / "group"), "zip", root / "group.zarr")
    shutil.rmtree(root / "group.zarr")
    return "zarr:group.zip"


def write_robots(root: Path, name: str) -> str:
    pytest.importorskip("pyarrow"), pytest.importorskip("av")
    shutil.copytree(ROBOTS / name, root / name)
    return f"{name.rstrip('1234567890')}:{name}"


def write_lerobot(root: Path) -> str:
    return write_robots(root, "lerobot")


def write_lerobot21(root: Path) -> str:
    return write_robots(root, "lerobot21")


def write_rlds(root: Path) -> str:
    pytest.importorskip("google_crc32c")
    return write_robots(root, "rlds")


def write_npz(root: Path) -> str:
    (root / "npz").mkdir()
    for number in range(4):
        np.savez(root / f"npz/{number}.npz", x=np.arange(number + 2.0), task=np.array("a" * number))
    return "npz:npz"


def write_parquet(root: Path) -> str:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    for part in range(3):
        rows = {"episode": [part] * 3, "x": [float(part)] * 3, "task": [f"t{part}"] * 3}
        pq.write_table(pa.table(rows), root / f"{part}.parquet")
    return "parquet:*.parquet"


def write_hf(root: Path) -> str:
    datasets = pytest.importorskip("datasets")
    rows = {"episode": [0, 0, 1, 2, 2], "x": [[1.0, 2.0]] * 5, "task": ["öffne", "", "b", "c", "d"]}
    made = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict({"train": made, "test": made.select([2])}).save_to_disk(root / "saved")
    return "hf:saved"


QUICK = [write_hdf5, write_robomimic_file, write_zarr3, write_zarr_zip, write_rlds, write_npz]
SLOW = [write_minari, write_zarr2, write_lerobot, write_lerobot21, write_parquet, write_hf]
FORMATS = [*QUICK, *(pytest.param(write, marks=pytest.mark.long) for write in SLOW)]
OPTIONS: dict[Any, dict[str, Any]] = {
    write_hf: {"split": "train"},
    write_robomimic_file: {"split": "train"},
    write_rlds: {"split": "train"},
}


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


def upload(root: Path, address: str = ROOT) -> None:
    system, path = fsspec.url_to_fs(address)
    for each in root.rglob("*"):
        if each.is_file():
            system.pipe_file(f"{path}/{each.relative_to(root)}", each.read_bytes())


def at(name: str, root: Any) -> str:
    """A name, ``kind:path``, of a path below a root."""
    kind, _, path = name.partition(":")
    return f"{kind}:{root}/{path}"


def bits(value: Any) -> Any:
    if isinstance(value, Ragged):
        return [bits(each) for each in value]
    if isinstance(value, (list, tuple)):
        return [bits(each) for each in value]
    return (
        value if isinstance(value, (str, bytes)) else (str(value.dtype), value.shape, value.numpy().tobytes())
    )


def content(table: gear.Table) -> list[Any]:
    """All values, in the order of the trajectories."""
    return [{name: bits(value) for name, value in table[index].items()} for index in table.indices().tolist()]


def load(name: str, *table: gear.Table, **options: Any) -> gear.Table:
    return gear.load_dataset(name, *table, progress=False, **options)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("write", FORMATS)
def test_a_data_set_at_an_address_is_what_it_is_here(
    tmp_path: Path, write: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS.get(write, {})
    name = write(tmp_path)
    upload(tmp_path)
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 1000)
    with load(at(name, tmp_path), **options) as here, load(at(name, ROOT), **options) as there:
        assert there.schema == here.schema
        assert content(there) == content(here)
    kind, _, path = at(name, ROOT).partition(":")
    read = registry.function(kind)
    assert read is not None
    read_in_parts(read(path, **options))


def failing(monkeypatch: pytest.MonkeyPatch, fault: Callable[[int, bytes], Any]) -> list[int]:
    """Let `fault` change what the store answers: called with the number of the request, and the answer."""
    kind, requests = type(fsspec.filesystem("memory")), list[int]()
    real = kind.cat_file

    def cat_file(self: Any, path: str, start: Any = None, end: Any = None, **given: Any) -> Any:
        requests.append(0)
        return fault(len(requests) - 1, real(self, path, start, end, **given))

    monkeypatch.setattr(kind, "cat_file", cat_file)
    return requests


def flaky(number: int, data: bytes) -> bytes:
    if number % 3 == 0:
        raise TimeoutError("slow")
    return data[: len(data) // 2] if number % 3 == 1 else data


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("write", FORMATS)
def test_what_the_store_answers_is_what_an_error_says(
    tmp_path: Path, write: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals end at once, whatever library reads the bytes; others are repeated. Files are read by range."""
    options = OPTIONS.get(write, {})
    name = write(tmp_path)
    upload(tmp_path)
    monkeypatch.setattr(addresses, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(source_files, "WHOLE_BYTES", 0)
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 10_000)
    with load(at(name, tmp_path), **options) as here:
        for fault in (flaky, lambda number, data: data):
            with pytest.MonkeyPatch.context() as patch:
                count = failing(patch, fault)
                with load(at(name, ROOT), **options) as there:
                    assert content(there) == content(here)
    last = len(count) - 1
    for refusing in sorted({0, last // 3, last // 2, last}):

        def refused(number: int, data: bytes, at: int = refusing) -> bytes:
            if number == at:
                raise PermissionError(13, "Forbidden")
            return data

        with pytest.MonkeyPatch.context() as patch:
            failing(patch, refused)
            with pytest.raises(
                SourceError, match=r"memory://.* cannot be read: the store answered .*Forbidden"
            ):
                load(at(name, ROOT), **options)


@pytest.mark.parametrize("write", [write_hdf5, write_zarr3, pytest.param(write_rlds, marks=pytest.mark.long)])
def test_in_the_background_from_an_address(tmp_path: Path, write: Callable[[Path], str]) -> None:
    """What `wait`, `resume`, `filter` and `refresh` do with files here, they do with those at addresses."""
    options = OPTIONS.get(write, {})
    name = write(tmp_path)
    upload(tmp_path)
    address = at(name, ROOT)

    def short(episode: Any) -> bool:
        return len(next(iter(episode.values()))) < 15

    with load(at(name, tmp_path), **options) as here, load(address, wait=False, **options) as there:
        there.loading.wait()  # type: ignore[union-attr]
        expected, size = content(here), here.stats().payload_bytes
        assert content(there) == expected
        columns, limits = dict(there.schema), {"max_steps": 2000, "max_trajectories": 20}
        memory = gear.Memory(payload=100_000) if there.schema.ragged else None
    with gear.Table.create(columns, **limits, memory=memory) as table:
        load(address, table, max_trajectories=2, **options)
        load(address, table, resume=True, **options)
        assert content(table) == expected
    with (
        load(at(name, tmp_path), filter=short, **options) as here,
        load(address, filter=short, **options) as there,
    ):
        assert content(here) == content(there)
    refresh = gear.sources.Refresh(epochs=2, seed=1, samples_per_insert=0.01)
    with load(address, max_bytes=int(0.9 * size), refresh=refresh, **options) as table:
        replay = gear.ReplayDataset(table, batch_size=8, windows=gear.Window(1), device="cpu", prefetch=0)
        while not table.loading.done:  # type: ignore[union-attr]
            replay.sample()
        table.loading.wait()  # type: ignore[union-attr]
        assert set(map(str, content(table))) <= set(map(str, expected))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [*QUICK, *SLOW[:-1]])
def test_damaged_objects_are_what_damaged_files_are(tmp_path: Path, write: Callable[[Path], str]) -> None:
    """The same values, or an error. (Of Hugging Face's files here its own package reads more than is needed.)"""
    options = {"allow_nonfinite": True, **OPTIONS.get(write, {})}
    name = write(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    source, refused = np.random.default_rng(7), 0
    for turn in range(60):
        path = files[turn % len(files)]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        if turn % 3 == 2:
            del damaged[int(source.integers(len(whole))) :]
        for place in source.integers(len(damaged), size=2) if damaged else ():
            damaged[place] = int(source.integers(256))
        path.write_bytes(damaged)
        upload(tmp_path)
        found = []
        for root in (str(tmp_path), ROOT):
            try:
                with load(at(name, root), **options) as table:
                    table.check_valid()
                    found.append(content(table))
            except (SourceError, CodecError) as error:
                found.append(type(error))
        if write is write_zarr2 and not isinstance(found[0], type):  # numcodecs leaves memory as it is
            found = [len(each) for each in found]
        assert found[0] == found[1]
        refused += found[0] is SourceError
        path.write_bytes(whole)
    assert refused > 10


def test_a_process_forked_while_hdf5_is_read_collects_garbage() -> None:
    with hdf5_file._no_collection:
        assert in_child(lambda: str(gc.isenabled())) == "True"
        assert not gc.isenabled()
    assert gc.isenabled()

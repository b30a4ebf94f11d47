"""Data sets on a server of the S3 protocol that fails at a request: the same values later, or an error that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import needs
from object_store import ObjectStore, object_store
from test_sources_buckets import (
    OPTIONS,
    QUICK,
    at,
    content,
    load,
    upload,
    write_hf,
    write_lerobot,
    write_minari,
    write_npz,
)

import gear_loader as gear
from gear_loader.errors import CheckpointError, SourceError
from gear_loader.sources import source_files
from gear_loader.utils import addresses, remote_file

fsspec = pytest.importorskip("fsspec")
needs("s3fs", "moto", "flask_cors")  # the last of moto's server

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::UserWarning")]
FORMATS = [*QUICK, write_lerobot, write_minari, write_hf]


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> Iterator[None]:
    """The library's own retries are what is tested; files are read by range."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    monkeypatch.setattr(addresses, "DEADLINE_SECONDS", 5.0)
    monkeypatch.setattr(source_files, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(remote_file, "BLOCK_BYTES", 50_000)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield
    store.plan()


@pytest.mark.parametrize("write", FORMATS)
def test_requests_of_a_data_set_may_fail(
    tmp_path: Path, write: Callable[[Path], str], store: ObjectStore
) -> None:
    options, name, root = OPTIONS.get(write, {}), write(tmp_path), f"s3://bucket/{write.__name__}"
    upload(tmp_path, root)
    with load(at(name, tmp_path), **options) as here:
        expected = content(here)
    store.plan()
    with load(at(name, root), **options) as there:
        assert content(there) == expected
    count = len(store.seen())
    for act in ("half", "cut", "429", "500", "403", "404"):
        for turn in sorted({0, count // 2, count - 1}):
            store.plan(at=turn, act=act)
            try:
                with load(at(name, root), **options) as there:
                    assert content(there) == expected
                    assert act not in ("403",) or turn == 0, (act, turn)
            except SourceError as error:
                assert act in ("403", "404"), (act, turn, error)  # noqa: PT017
                assert root in str(error), error  # noqa: PT017
            store.plan()


def test_a_store_that_is_slow_or_away(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, root = write_npz(tmp_path), "s3://bucket/slow"
    upload(tmp_path, root)
    monkeypatch.setattr(addresses, "REQUEST_SECONDS", 1.0)
    with load(at(name, tmp_path)) as here:
        store.plan(at=3, act="slow")
        with load(at(name, root)) as there:
            assert content(there) == content(here)
    store.plan(at=3, act="500", times=-1)
    with pytest.raises(SourceError, match=r"s3://bucket/slow/.* cannot be read: \d+ tries in \d s failed"):
        load(at(name, root))


def new_table() -> gear.Table:
    table = gear.Table.create({"x": gear.Column(torch.float32, (40_000,))}, max_steps=100, max_trajectories=5)
    for number in range(3):
        table.add({"x": np.full((20, 40_000), number, np.float32)})
    return table


@pytest.mark.parametrize("address", ["npz:{}", "parquet:{}/a.parquet", "hf:{}"])
@pytest.mark.parametrize("act", ["cut-body", "500", "403"])
def test_requests_of_an_export_may_fail(store: ObjectStore, address: str, act: str) -> None:
    """It is there as a whole, or nothing is."""
    system, turn, count = fsspec.filesystem("s3"), 0, 1
    with new_table() as table:
        while turn < count:
            root = f"s3://bucket/export-{act}-{address.partition(':')[0]}-{turn}"
            store.plan(at=turn, act=act)
            try:
                table.export(address.format(root))
            except CheckpointError as error:
                assert act == "403"
                assert root in str(error)  # noqa: PT017
                store.plan()
                assert not system.find(root)
            else:
                assert act != "403" or turn == count - 1
                count = len(store.seen())
                store.plan()
                with load(address.format(root), columns=["x"]) as again:
                    assert content(again) == content(table)
            turn += 2

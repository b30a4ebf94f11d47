"""Calls that take a path: a remote one is refused, before anything is written."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cli_common import run
from table_common import fresh_name

import gear_loader as gear
from gear_loader import errors
from gear_loader.transport.tls import client_context, server_context
from gear_loader.utils.paths import is_address

COLUMNS = {"x": gear.Column(torch.int64)}


def new_table(**options: Any) -> gear.Table:
    return gear.Table.create(COLUMNS, max_steps=64, max_trajectories=4, **options)


def serve(**options: Any) -> None:
    with new_table(name=fresh_name()) as table:
        try:
            table.serve(**options)
        finally:
            table.unlink()


CALLS: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: new_table().save(path),
    "load": gear.Table.load,
    "recover": gear.Table.recover,
    "disk": lambda path: new_table(disk=gear.Disk(path)),
    "tier": lambda path: new_table(disk=gear.Disk(path, size="1MiB"), memory="1MiB"),
    "shards, save": lambda path: gear.distributed.save(gear.distributed.Shards(new_table()), path),
    "shards, load": gear.distributed.load,
    "sources.load": gear.sources.load,
    "hdf5": gear.sources.read_hdf5,
    "minari": gear.sources.read_minari,
    "module": lambda path: gear.ReplayDataModule(
        os.fspath(path) + ".hdf5", batch_size=1, windows=gear.Window(1)
    ),
    "secret": lambda path: gear.connect("gear://127.0.0.1:1/x", secret_file=path),
    "authorities": lambda path: gear.connect("gears://127.0.0.1:1/x", secret=b"0" * 16, ca_file=path),
    "client": client_context,
    "certificate": lambda path: server_context(path, "key.pem"),
    "serve": lambda path: serve(tls=(path, "key.pem"), secret=b"0" * 16),
}


# Take addresses; what Path has made of one is none.
REMOTE = ("save", "load", "shards, save", "shards, load", "sources.load", "hdf5", "minari")


PATHS = ("s3://bucket/x", pathlib.Path("gs://bucket/x"), "simplecache::s3://bucket/x", "file:///tmp/x")


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, path) for name in CALLS for path in PATHS if name not in REMOTE or not is_address(path)],
)
def test_a_path_with_a_scheme_is_refused_before_anything_is_written(
    name: str, path: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        errors.GearError, match=r"has a scheme; expected the path of a local file or directory"
    ):
        CALLS[name](path)
    assert not os.listdir(tmp_path)


def test_a_local_path_may_look_like_one(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("./s3://bucket/x", "a:b/c", tmp_path / "here" / "s3:"):
        new_table().save(path)
    assert sorted(os.listdir(tmp_path)) == ["a:b", "here", "s3:"]


def test_the_command_line_refuses_them(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["serve", "x", "--secret-file", "s3://b/x"], ["ucx-env", "s3://b/x"]):
        code, output = run(*command)
        assert code == 1
        assert "has a scheme" in output
    assert not os.listdir(tmp_path)

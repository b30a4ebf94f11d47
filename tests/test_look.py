"""`gear-loader look` and `gear-loader convert`."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_common import run

import gear_loader as gear
from gear_loader.look import summary

LENGTHS = (3, 12, 1, 7)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a table with an image that tells its step, curves, text, and a column that has NaN."""
    table = gear.Table.create(
        {
            "image": gear.Column(torch.uint8, (16, 16, 3)),
            "state": gear.Column(torch.float32, (2,)),
            "text": gear.Column(str),
            "task": gear.Column(str, per="trajectory"),
        },
        max_steps=40,
        max_trajectories=4,
        memory=gear.Memory(payload="1MiB"),
    )
    for number, length in enumerate(LENGTHS):
        steps = np.arange(length)
        state = np.stack([steps, -steps], axis=1).astype(np.float32)
        if number == 1:
            state[0] = np.nan
        table.add(
            {
                "image": np.broadcast_to(steps[:, None, None, None] * 20, (length, 16, 16, 3)).astype(
                    np.uint8
                ),
                "state": state,
                "text": [f"<i>{k}</i>" for k in range(length)],
                "task": f"task {number}",
            }
        )
    table.save(tmp_path / "saved")
    table.close()
    return tmp_path / "saved"


def test_the_terminal_shows_lengths_and_ranges(saved: Path) -> None:
    code, output = run("look", str(saved))
    assert code == 0, output
    assert "4 episodes, 23 steps" in output
    assert "Lengths: 1 to 12, median 5" in output
    state = re.search(r"state +float32 \[2\] +step +(\S+) +(\S+) +(\S+) +(\S+) +(.*)", output)
    assert state is not None
    values = np.concatenate([np.arange(length) for length in LENGTHS])
    values = np.concatenate([values, -values])
    values = np.delete(values, [3, 3 + len(values) // 2])  # both elements that are NaN
    expected = [values.min(), values.mean(), values.max(), values.std()]
    assert [float(each) for each in state.groups()[:4]] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert "2 NaN or infinite" in state[5]


def test_the_page_needs_nothing_else_and_shows_frames(saved: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    path = tmp_path / "look.html"
    code, output = run("look", str(saved), "--html", str(path), "--episode", "1")
    assert code == 0, output
    text = path.read_text("utf-8")
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert "<i>" not in text
    assert "&lt;i&gt;11&lt;/i&gt;" in text
    assert "Episode 1: 12 steps" in text
    assert "Episode 0" not in text
    strip = image.open(io.BytesIO(base64.b64decode(re.search(r"base64,(\S+?)\"", text)[1])))  # type: ignore[index]
    shades = [strip.getpixel((164 * place + 80, 80))[0] for place in range(8)]
    assert shades == [20 * step for step in summary.spread(12, 8)]


def test_a_named_table_and_one_without_episodes(tmp_path: Path) -> None:
    name = f"look-{tmp_path.name}"
    with gear.Table.create(
        {"x": gear.Column(torch.float32)}, max_steps=9, max_trajectories=2, name=name
    ) as table:
        code, output = run("look", name)
        assert (code, "0 episodes" in output) == (0, True)
        table.unlink()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["nothing-of-this-name"], "nothing-of-this-name"), (["{}", "--episode", "4", "--html", "x"], "0 to 3")],
)
def test_what_cannot_be_shown_is_an_error(saved: Path, words: list[str], message: str) -> None:
    code, output = run("look", *(word.format(saved) for word in words))
    assert (code, message in output) == (1, True), output
    assert "Traceback" not in output


def test_places_are_evenly_spaced() -> None:
    assert summary.spread(3, 5) == [0, 1, 2]
    assert summary.spread(101, 3) == [0, 50, 100]
    assert summary.bars(np.array([], dtype=np.int64)) == ""
    assert summary.bars(np.array([1, 1, 3])) == "█▁▅"


def test_ranges_are_of_some_episodes_where_all_are_too_many(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_READ_BYTES", 1)
    _, output = run("look", str(saved))
    assert "Ranges are of 1 episodes" in output


def test_a_data_set_is_converted(saved: Path, tmp_path: Path) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "out.parquet"
    code, output = run("convert", str(saved), str(target), "--column", "text", "--column", "s=state")
    assert code == 0, output
    assert "4 episodes, 23 steps" in output
    assert parquet.read_table(target).column_names == ["episode_index", "frame_index", "text", "s"]
    code, output = run("convert", str(saved), str(target))
    assert (code, "is there already" in output) == (1, True)
    for words, message in (
        (["compression=3x"], "3x"),
        (["file_bytes=0"], "file_bytes"),
        (["speed=1"], "'speed'"),
    ):
        code, output = run("convert", str(saved), f"parquet:{tmp_path}/b", "--option", *words)
        assert (code, message in output) == (1, True), output
    code, output = run("convert", str(saved), f"parquet:{tmp_path}/b", "--option", 'compression="none"')
    assert code == 0, output

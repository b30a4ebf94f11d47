"""Checkpoint and memory: what is stored and loaded is compared; peers that fail are left out, ours end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks_common import Here, check_row, rows_of, session, worker

from benchmarks import workloads
from benchmarks.experiments import checkpoint, memory
from benchmarks.peers import catalog, gear, plain, process
from benchmarks.peers import checkpoint as peers
from benchmarks.peers import source as sources

SPEC = {"columns": {"observation": [3], "reward": []}, "steps": 10, "trajectories": 60, "more": 20, "seed": 1}
COLUMNS = {"observation": (17,), "action": (6,), "reward": ()}
WORKLOADS = ["save", "save again", "load", "load, cold"]


def missing() -> Any:
    raise process.PeerFailed("nowhere: No such file or directory")


# Checkpoints -----------------------------------------------------------------------------------------


class Stale(plain.Saved):  # type: ignore[misc, name-defined]
    """Saves once only."""

    def open(self) -> None:
        super().open()
        for values in self.store.values():
            values.fill_(float("nan"))

    def save(self) -> None:
        if not (Path(self.folder) / "tensors.pt").exists():
            super().save()


class Changed(gear.Checkpoint):  # type: ignore[misc, name-defined]
    """Loads the sign of a zero wrongly."""

    def add(self, first: int, rows: Any) -> None:
        super().add(first, {**rows, "action": -np.zeros_like(rows["action"])})


def saved(tmp_path: Path, kinds: list[Any]) -> tuple[list[dict[str, Any]], str]:
    """The rows, and what was left out."""
    out, folder = tmp_path / "new" / "rows.jsonl", tmp_path / "disk"
    made = session(out, experiment="checkpoint")
    folder.mkdir()
    try:
        checkpoint.measured(made, workloads.W1.of(60), kinds, folder)
    finally:
        assert not list(folder.iterdir())  # nothing stays
    return rows_of(out), "\n".join(made.reasons)


def kind(name: str, subject: Any, *, ours: bool = False) -> Any:
    return catalog.Contender(name, lambda: Here(worker("checkpoint", subject)), ours)


def test_rows_have_what_a_journey_took_and_others_that_fail_are_left_out(tmp_path: Path) -> None:
    kinds = [
        kind("yardstick", plain.Yardstick, ours=True),
        kind(checkpoint.KEPT, plain.Kept, ours=True),
        kind("ours", gear.Checkpoint, ours=True),
        kind("torch.save", plain.Saved),
        kind("stale", Stale),
        catalog.Contender("cpprb", missing),
    ]
    rows, reasons = saved(tmp_path, kinds)
    for row in rows:
        check_row(row, "checkpoint")
    assert [(row["workload"], row["variant"]) for row in rows] == [
        *((workload, name) for workload in WORKLOADS[:2] for name in ("write", "ours", "torch.save")),
        *((load, name) for load in WORKLOADS[2:] for name in ("read", "read, kept", "ours", "torch.load")),
    ]
    targets = [row["targets"] for row in rows if row["variant"] == "ours"]
    assert targets == [{"write": 0.7}, {}, {"read, kept": 0.7}, {"read, kept": 0.7}]
    assert (rows[1]["bytes"], rows[4]["bytes"]) == (60 * 42_000, 80 * 42_000)
    assert "left out: stale: ValueError: row 0 begins with nan" in reasons
    assert reasons.count("left out: ") == 2
    assert "left out: cpprb: nowhere: No such file or directory" in reasons


def test_ours_that_fails_ends_the_run(tmp_path: Path) -> None:
    kinds = [kind("yardstick", plain.Yardstick, ours=True), kind("ours", Changed, ours=True)]
    with pytest.raises(process.PeerFailed, match="ours: ValueError: action of row 0 differs"):
        saved(tmp_path, kinds)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", [*plain.KINDS["checkpoint"].values(), gear.Checkpoint])
def test_each_variant_loads_what_it_saved(kind: Any, tmp_path: Path) -> None:
    found = worker("checkpoint", kind).journey(SPEC, str(tmp_path))
    assert all(found[workload] > 0 for workload in WORKLOADS)
    assert found["extras"]["save again"]["bytes on disk"] >= 80 * 10 * 16
    assert found["synced"] is (kind is not plain.Saved)


def test_what_was_not_loaded_is_found(tmp_path: Path) -> None:
    class Lost(plain.Saved):  # type: ignore[misc, name-defined]
        def everything(self) -> Any:
            return list(super().everything())[self.skip]

    source = sources.Source({**SPEC, "trajectories": 80})
    for skip, message in (
        (slice(3), "60 trajectories were loaded; expected 80"),
        (slice(1, 4), "20 comes after 0"),
    ):
        subject = Lost(source, str(tmp_path))
        subject.skip = skip
        subject.open()
        for first, rows in source.stacked(peers.UNIT):
            subject.add(first, rows)
        with pytest.raises(ValueError, match=message):
            subject.check()
    bare = plain.Yardstick(source, str(tmp_path))
    bare.open()
    bare.save()
    (tmp_path / "bytes").write_bytes(b"short")
    bare.restore()
    with pytest.raises(ValueError, match="5 bytes were read; expected 12800"):
        bare.check()


# Memory ----------------------------------------------------------------------------------------------


class Wrong(plain.Listed):  # type: ignore[misc, name-defined]
    """Stores one value wrongly."""

    def fill(self) -> None:
        super().fill()
        self.store[-1]["action"][-1, 3] += 1


def test_ours_that_stores_wrongly_ends_the_run(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 200)
    setting = memory.Setting("uneven", "W2", COLUMNS, lengths)
    kind = catalog.Contender("ours", lambda: Here(worker("memory", Wrong)), True)
    with pytest.raises(process.PeerFailed, match="differs from what was stored"):
        memory.measured(session(tmp_path / "rows.jsonl", experiment="memory"), setting, [kind])
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_named_table_is_counted_by_its_file_and_removed() -> None:
    source = sources.Source({"columns": COLUMNS, "lengths": [40, 7, 300], "seed": 1})
    subject = gear.Memory(source, block_steps=32, named=True)
    path = Path(gear.region_path(subject._name))
    try:
        assert subject.beside() >= subject._table.stats().reserved_bytes > 0
    finally:
        subject.close()
    assert not path.exists()
    assert gear.Memory(source, block_steps=32).beside() == 0


def test_lengths_of_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    def setting(lengths: Any) -> Any:
        return memory.Setting("x", "W2", COLUMNS, np.array(lengths))

    for name in memory.DISTRIBUTIONS:  # as many steps as asked for
        lengths = memory._enough(memory.DISTRIBUTIONS[name], 400_000)
        assert lengths.min() >= 1
        assert lengths.sum() == pytest.approx(400_000, rel=0.1)
    for lengths, block in (([100] * 64, 100), ([320, 64, 96] * 20, 32)):
        assert memory.best_block(setting(lengths)) == block
    monkeypatch.setattr(memory, "ROWS_BYTES", 50 * 300 * 96)  # the longest is among those that have a row
    for lengths, expected in (
        ([*[100] * 80, 300, *[20] * 80], [300, *[100] * 49]),
        ([5, 300, 7], [300, 5, 7]),
    ):
        assert setting(lengths).of_rows().lengths.tolist() == expected

"""The report: one page of made-up rows, and what it says."""

from __future__ import annotations

import base64
import html
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from benchmarks_common import call
from report_common import GPU, Made, every_experiment, headline, on_a_gpu, spread, written

from benchmarks import experiments
from benchmarks.reporting import findings, provenance, tables
from benchmarks.reporting import rows as rows_module

for package in ("jinja2", "matplotlib"):
    pytest.importorskip(package)


HOSTILE = "<script>document.title='broken'</script>\"'&{{ 7 * 7 }}"


def found_of(*made: Made) -> Any:
    return rows_module.comparisons([json.loads(json.dumps(row)) for one in made for row in one.rows])


class _Reader(HTMLParser):
    """Tags with their attributes, and the text of each section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.text = text
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"] or ""

    def handle_data(self, data: str) -> None:
        self.texts[self._section] = self.texts.get(self._section, "") + " " + " ".join(data.split())

    def section(self, name: str) -> str:
        return " ".join(self.texts[name].split())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report on all experiments and two devices, with names that try to break out."""
    folder = tmp_path_factory.mktemp("report")
    rows = every_experiment(Made("run-cpu")) + on_a_gpu(Made("run-gpu", GPU))
    hostile = Made("run-hostile", configuration={"quick": False, "note": HOSTILE})
    speeds = {"memcpy": 2e9, "ours": 1e9, HOSTILE: 5e8}
    hostile.compare("collect", HOSTILE, f"{HOSTILE}, batch 7", speeds, "memcpy", {"batch": 7})
    hostile.leave("select", HOSTILE, HOSTILE)
    file = written(folder / "rows.jsonl", rows + hostile.rows)
    done = call("report", str(file), "--out", str(folder / "new" / "report"))
    assert done.exit_code == 0, done.output
    assert str(folder / "new" / "report" / "index.html") in done.stdout
    return folder / "new" / "report"


@pytest.fixture(scope="module")
def read(made: Path) -> _Reader:
    """Its page."""
    return _Reader((made / "index.html").read_text(encoding="utf-8"))


def report_of(folder: Path, rows: Any) -> _Reader:
    done = call("report", str(written(folder / "rows.jsonl", rows)), "--out", str(folder / "report"))
    assert done.exit_code == 0, done.output
    return _Reader((folder / "report" / "index.html").read_text(encoding="utf-8"))


# The page --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_page_needs_nothing_else_and_has_the_pictures_in_it(made: Path, read: _Reader) -> None:
    for tag, attributes in read.tags:
        assert tag not in ("script", "link", "iframe", "object"), tag
        for name in ("src", "href", "srcset"):
            value = attributes.get(name) or ""
            assert not value or value.startswith(("data:image/png;base64,", "#")), value[:60]
    assert not re.search(r"https?://|url\(|@import", read.text)
    images = {a["data-file"]: a for tag, a in read.tags if tag == "img"}
    files = {path.name: path.read_bytes() for path in made.glob("*.png")}
    assert set(images) == set(files)
    for name, content in files.items():
        assert content.startswith(b"\x89PNG")
        assert base64.b64decode((images[name]["src"] or "").partition(",")[2]) == content
        assert images[name]["alt"]
    assert {"headline-cpu.png", "headline-gpu-nvidia-h100.png", "collect-rows-gpu-nvidia-h100.png"} <= set(
        files
    )
    for experiment in experiments.EXPERIMENTS:
        if experiment.name != "device":  # which has tables alone: its units differ
            assert f"{experiment.name}-cpu.png" in files


@pytest.mark.long
def test_headings_contents_and_hostile_names(read: _Reader) -> None:
    text = read.text
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    targets = {a["href"] for tag, a in read.tags if tag == "a"}
    assert targets <= {f"#{a['id']}" for _, a in read.tags if a.get("id")}
    assert {f"#experiment-{experiment.name}" for experiment in experiments.EXPERIMENTS} <= targets
    assert HOSTILE not in text
    assert html.escape(HOSTILE).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in text
    assert HOSTILE in read.section("experiments")
    assert HOSTILE in read.section("not-measured")


@pytest.mark.long
def test_the_headline_and_how_it_was_measured(read: _Reader) -> None:
    shown = read.section("headline")
    assert "through DataLoader at 13 GB/s" in shown
    assert "1.86× cpprb and 16× Reverb, gRPC" in shown
    assert "The limit, memcpy of as many bytes, is 17 GB/s, of which that is 76%." in shown
    assert "Measured on Made-up CPU, 2 cores, 2026-11-22, commit 0123456789ab." in shown
    assert "at 39 GB/s (p10 to p90: 37.1 – 41.1 GB/s): 1.86× cpprb and 16× Reverb, gRPC" in shown
    how = read.section("how")
    told = ("take turns (A B A B", "load 0.1 at the start", "torch 2.13.0", "cpprb: cpprb 11.0", "run-gpu")
    assert all(text in how for text in told)
    assert "python -m benchmarks single-server --threads 2 --repeats 5 --peers .peers" in how
    assert "python -m benchmarks collect --threads 2 --repeats 5 --device cuda" in how
    assert "TorchRL left out no interpreter with it is there 2026-11-22" in read.section("not-measured")
    growth = read.section("growth")
    for text in ("number of items N", "batch, trajectories", "bytes of a row", "writer processes", "nodes"):
        assert text in growth


@pytest.mark.long
def test_what_is_lost_is_as_plain_as_what_is_won(read: _Reader) -> None:
    lost = read.section("lose")
    assert "collect, W1 index_select collector, blocks 100 0.50× W1, batch 32 3 of 3 3 cpu" in lost
    # Of both devices the same target is missed: 13 / 7 of cpprb, where 1.9 were aimed for.
    assert lost.count("at least 1.9 × cpprb 1.86 × (1.76 – 1.95) 98% missed") == 5
    assert "multi-server requests of 65536 ours at least 0.9 × bare 0.70 × (0.66 – 0.73) 78% missed" in lost
    assert "at least 15 × Reverb" not in lost
    targets = read.section("targets")
    assert "memory uniform 1 to 100 ours at most 1.05 1.03" in targets
    assert "at least 15 × Reverb, gRPC 16.25 × (15.44 – 17.06) 108% met" in targets


def test_without_gpu_rows_there_is_no_gpu_figure_and_quick_runs_are_left_away(tmp_path: Path) -> None:
    quick, full = Made("quick", configuration={"quick": True}, date="2026-11-23"), Made("full")
    headline(quick, factor=1e6)
    headline(full)
    read = report_of(tmp_path, quick.rows + full.rows)
    assert "at 13 GB/s" in read.section("headline")
    assert not [path.name for path in (tmp_path / "report").glob("*.png") if "gpu" in path.name]
    assert "No figure on this page was measured on a GPU." in read.section("")
    assert "No figure was measured on a GPU." in read.section("not-measured")
    assert "single-server: not on a GPU" in read.section("not-measured")
    assert "H100" not in read.text
    assert "They are no figures." in report_of(tmp_path, quick.rows).section("")


def test_missing_pieces_are_named(tmp_path: Path) -> None:
    made = Made("only", commit=None, dirty=None)
    made.compare("collect", "W1", "W1, batch 32", {"memcpy": 2e9, "collector": 1e9}, "memcpy", {"batch": 32})
    made.amount("train", "return", "ours", math.nan, "s", parameters={"return": 9, "curve": []})
    del made.rows[0]["versions"], made.rows[0]["configuration"]
    read = report_of(tmp_path, made.rows)
    for section, text in (
        ("headline", "Not measured here yet: python -m benchmarks single-server makes the rows."),
        ("lose", "There are no rows of other libraries to compare with."),
        ("targets", "No row has a target."),
        ("not-measured", "select: no rows at all"),
    ):
        assert text in read.section(section)
    assert "nan" not in read.section("experiments")
    assert (tmp_path / "report" / "collect-cpu.png").is_file()


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    for lines, message in (
        (None, "rows.jsonl is not there; run `python -m benchmarks run all` first"),
        ("", "no row of"),
        ('{"experiment": "select"', "line 1: no JSON"),
        ("[1]\n", "line 1: list in place of a row"),
        ('\n{"experiment": "select"}\n', "line 2: expected 'device' as str, found None"),
    ):
        file = tmp_path / "rows.jsonl"
        if lines is not None:
            file.write_text(lines)
        done = call("report", str(file), "--out", str(tmp_path / "report"))
        assert done.exit_code == 2, message
        shown = "".join(done.stderr.replace("│", " ").split())
        assert "".join(message.split()) in shown
    assert not (tmp_path / "report").exists()


# Rows ------------------------------------------------------------------------------------------------


def test_the_last_of_equal_rows_counts_and_places_stay_apart() -> None:
    first, second, other = Made("a"), Made("b", date="2026-11-23"), Made("c", GPU)
    for made, factor in ((first, 1e9), (second, 2e9), (other, 3e9)):
        headline(made, factor=factor)
    # Peers say something about themselves; that makes no other measurement.
    second.rows[-1]["parameters"]["peer"] = "another version"
    found = found_of(second, first, other)
    rows = rows_module.measured(sorted(first.rows + second.rows + other.rows, key=lambda row: row["date"]))
    assert len(rows) == 2 * len(first.rows)
    assert [(c.place.device, c.rows["ours"]["run"]) for c in rows_module.comparisons(rows)] == [
        (GPU, "c"),
        ("cpu", "b"),
    ]
    assert {c.place.device for c in found} == {"cpu", GPU}
    machine = {**first.rows[0]["machine"], "cores": 64}
    elsewhere = [{**row, "machine": machine} for row in first.rows]
    assert len(rows_module.comparisons(first.rows + elsewhere)) == 2


def test_ratios_are_taken_within_one_run() -> None:
    # The peer was measured on a slow day; today only ours was, on a fast one.
    before, now = Made("before"), Made("now", date="2026-11-23")
    before.compare("collect", "W1", "W1", {"memcpy": 2e9, "ours": 1e9, "peer": 5e8}, "memcpy", {"batch": 1})
    now.compare("collect", "W1", "W1", {"memcpy": 8e9, "ours": 4e9}, "memcpy", {"batch": 1})
    (comparison,) = found_of(before, now)
    assert comparison.rows["ours"]["run"] == "now"
    assert comparison.ratio(comparison.ours[0], comparison.rows["peer"]) == pytest.approx(2)
    # One that never took turns with ours has no ratio.
    alone = Made("alone", date="2026-11-24")
    alone.compare("collect", "W1", "W1", {"memcpy": 8e9, "other": 4e9}, "memcpy", {"batch": 1})
    (comparison,) = found_of(before, now, alone)
    assert math.isnan(comparison.ratio(comparison.ours[0], comparison.rows["other"]))
    assert findings.tally([comparison]) == (1, 1)


def test_comparisons_of_the_same_label_say_what_sets_them_apart() -> None:
    made = Made("one")
    for batch in (32, 64):
        for network in ("processes", "namespaces"):
            where = {"batch": batch, "network": network, "part": "collect"}
            made.compare("multi-server", "W1", f"batch {batch}", {"bare": 2e9, "ours": 1e9}, "bare", where)
    assert [comparison.label for comparison in found_of(made)] == [
        f"batch {batch}, network {network}" for batch in (32, 64) for network in ("processes", "namespaces")
    ]


def test_verdicts_of_targets() -> None:
    made = Made("one")
    for i, (low, mid, high) in enumerate(
        ((0.9, 1.1, 1.15), (0.8, 1.1, 1.2), (0.5, 0.9, 0.95), (1.0, 1.1, 2.0))
    ):
        ratio = {"targets": {"memcpy": 1.0}, "ratio": {"p10": low, "p50": mid, "p90": high}}
        speeds = {"memcpy": 2e9, "ours": 1e9}
        made.compare("collect", "W1", f"{i}", speeds, "memcpy", {"batch": i}, ours=ratio)
    made.compare("select", "cycle", "limit", {"ours": 1e6}, "ours", {}, "rows", ours={"limit": 0.0009})
    made.amount("memory", "uniform", "ours", 1.04, "bytes", at_most=1.05)
    made.amount("overlap", "rate", "ours", 0.5, "share", at_least=0.9)
    verdicts = {target.label: target.verdict for target in findings.targets(found_of(made))}
    words = {"0": "met", "1": "noisy", "2": "missed", "3": "met"}
    assert verdicts == {**words, "limit": "missed", "uniform": "met", "rate": "missed"}


def test_what_was_left_out_once_and_measured_later_is_not_listed() -> None:
    before, now = Made("before"), Made("now", date="2026-11-23")
    before.leave("collect", "peer", "not installed")
    before.leave("collect", "other", "not installed")
    now.compare("collect", "W1", "W1", {"memcpy": 2e9, "peer": 1e9}, "memcpy", {"batch": 1})
    found = found_of(now)
    assert [left.what for left in provenance.left_out(before.rows + now.rows, found)] == ["other"]


def test_numbers_are_written_as_people_read_them() -> None:
    texts = [tables.times(ratio) for ratio in (0.0046, 0.5, 1.94, 4.66, 16.3, 1234)]
    assert texts == ["0.0046×", "0.50×", "1.94×", "4.7×", "16×", "1,234×"]
    texts = [findings.duration(seconds) for seconds in (2e-7, 3.2e-6, 4e-4, 0.0126, 3, 1234, math.nan)]
    assert texts == ["0.2 µs", "3.2 µs", "400 µs", "12.6 ms", "3 s", "1,234 s", "–"]
    row = {"experiment": "select", "seconds": spread(1e-3), "rows": 10}
    assert (tables.amount(row), tables.scatter(row)) == ("1 ms", "950 µs – 1.05 ms")
    row = {"experiment": "online", "seconds": spread(1e-3), "rows": 10}
    assert (tables.amount(row), tables.scatter(row)) == ("10,000/s", "9,524/s – 10,526/s")

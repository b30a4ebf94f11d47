"""Prometheus' page: the text of statistics, and `gear-loader serve --metrics`."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest
from dataset_common import make_table, named_table

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.storage.prometheus import _SERIES
from gear_loader.transport.metrics_page import MetricsPage

SAMPLE = re.compile(r'gear_loader_([a-z_]+)\{table="((?:[^"\\\n]|\\["\\n])*)"\} (\S+)')


def parsed(text: str) -> dict[tuple[str, str], float]:
    """(series, table) -> value; checks that each series has one HELP, one TYPE and then its samples."""
    assert text.endswith("\n")
    found: dict[tuple[str, str], float] = {}
    series = ""
    for line in text.splitlines():
        if line.startswith("# HELP gear_loader_"):
            assert line.split()[2].removeprefix("gear_loader_") not in {name for name, _ in found}
            series = line.split()[2].removeprefix("gear_loader_")
        elif line.startswith("#"):
            kind = "counter" if series.endswith("_total") else "gauge"
            assert line == f"# TYPE gear_loader_{series} {kind}"
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == series
            name = re.sub(r"\\(.)", lambda escaped: {"n": "\n"}.get(escaped[1], escaped[1]), match[2])
            found[series, name] = float(match[3])
    return found


def test_every_number_is_in_the_text() -> None:
    """Also names that have to be escaped; each statistic has another value."""
    numbers = [
        field for field in dataclasses.fields(gear.TableStats) if field.name not in ("disk", "block_steps")
    ]
    with make_table() as table:
        stats = dataclasses.replace(
            table.stats(), **{field.name: 10 + place for place, field in enumerate(numbers)}
        )
    names = ['a "b"\n\\n', "other"]
    text = gear.prometheus_text({names[0]: stats, names[1]: stats, "gone": None})
    found = parsed(text)
    fields = {series: field for series, _, field, _ in _SERIES}
    # What is computed for comparison only is left out.
    assert {field.name for field in numbers} - set(fields.values()) == {"fixed_row_bytes"}
    for name in names:
        assert found["up", name] == 1
        assert {series: found[series, name] for series in fields} == {
            series: getattr(stats, field) for series, field in fields.items()
        }
    assert [key for key in found if key[1] == "gone"] == [("up", "gone")]
    assert found["up", "gone"] == 0
    with pytest.raises(SchemaError, match=r"3 was received; expected Table\.stats\(\)"):
        gear.prometheus_text({"a": 3})  # type: ignore[dict-item]


def test_prometheus_own_parser_reads_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with make_table() as table:
        text = gear.prometheus_text({'a "b"\n\\n': table.stats()})
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    (sample,) = families["gear_loader_steps"].samples
    assert sample.labels == {"table": 'a "b"\n\\n'}
    assert sample.value > 0
    assert families["gear_loader_inserted_trajectories"].type == "counter"


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return answer.read().decode()  # type: ignore[no-any-return]


def test_a_server_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEAR_LOADER_SECRET", "s" * 32)
    with named_table("test-metrics") as table:
        words = [
            sys.executable,
            "-m",
            "gear_loader",
            "serve",
            str(table.name),
            "gone-metrics",
            "--metrics",
            "0",
        ]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert server.stdout is not None
            ready: dict[str, Any] = json.loads(server.stdout.readline())
            url = ready["metrics"]
            assert url.startswith("http://127.0.0.1:")
            for _ in range(2):
                found, stats = parsed(read(url)), table.stats()
                name = str(table.name)
                assert found["steps", name] == stats.num_steps
                assert found["inserted_trajectories_total", name] == stats.num_inserted
                assert found["up", name] == 1
                assert found["up", "gone-metrics"] == 0
                table.remove(int(table.indices()[0]))
            with pytest.raises(urllib.error.HTTPError, match="404"):
                read(url.replace("/metrics", "/"))
        finally:
            server.terminate()
            server.communicate(timeout=60)
        assert server.returncode == 0


def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"The metrics cannot be served at 127.0.0.1:{port}: .*in use"):
            MetricsPage(str, "127.0.0.1", port)

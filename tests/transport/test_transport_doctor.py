"""`gear-loader doctor`: what is found here, what is missing elsewhere, and what follows from it."""

from __future__ import annotations

import importlib.util
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gear_loader import doctor
from gear_loader.cli import app

UCX = {"version": "0.52.00", "ucx": "1.21.0", "verbs": True, "library": "/usr/lib/libucp.so", "problem": None}
WORKS: dict[str, dict[str, Any]] = {
    "ucxx": UCX,
    "ucp": {"problem": "ModuleNotFoundError: No module named 'ucp'"},
    "nixl": {"version": "nixl-cu12 1.5.1", "verbs": True, "library": "/x/libucp.so", "problem": None},
    "cuda": {"torch": "2.13.0", "available": True, "devices": ["H200"], "pinning": True, "problem": None},
    "triton": {"version": "3.7.1", "problem": None},
    "numba": {"version": "0.68.1", "problem": None},
}
MISSING = {"problem": "ModuleNotFoundError: No module named 'ucxx'"}


class Elsewhere:
    """A machine with a GPU, InfiniBand and everything installed, and what a test takes away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.found = {name: dict(found) for name, found in WORKS.items()}
        self.devices = [["lo", "tcp"], ["mlx5_0:1", "ib"]]
        self.folder = folder
        for name in ("sys/mlx5_0", "dev/uverbs0", "dev/rdma_cm"):
            (folder / name).mkdir(parents=True)
        monkeypatch.setattr(doctor, "_SYS", folder / "sys")
        monkeypatch.setattr(doctor, "_DEV", folder / "dev")
        programs = {program: name for name, program in doctor._PROBES.items()}
        monkeypatch.setattr(doctor, "_probe", lambda program, deadline: self.found[programs[program]])
        monkeypatch.setattr(doctor, "_devices", lambda program, deadline: self.devices)
        monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
        for name in ("UCX_TLS", "UCX_POSIX_ERROR_HANDLING", "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"):
            monkeypatch.delenv(name, raising=False)

    def infiniband(self, carrier: str) -> dict[str, Any]:
        found: dict[str, Any] = doctor.report()["carriers"][carrier]["infiniband"]
        return found

    def slow(self) -> str:
        return "\n".join(" | ".join(each.values()) for each in doctor.report()["slow"])


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Elsewhere:
    return Elsewhere(monkeypatch, tmp_path)


@pytest.mark.long
def test_what_is_found_here() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["numba"]["version"]
    assert found["memory"]["shm_bytes"] > 0
    assert {"socket", "ucx", "ucp", "nixl"} == set(found["carriers"])
    for name, module in (("ucx", "ucxx"), ("nixl", "nixl_cu12")):
        carrier = found["carriers"][name]
        assert carrier["installed"] is (importlib.util.find_spec(module) is not None)
        if carrier["installed"]:
            assert carrier["problem"] is None
            assert carrier["version"]
            assert ["lo", "tcp"] in carrier["devices"]
        assert carrier["infiniband"]["possible"] or carrier["infiniband"]["reason"]


def test_what_a_probe_found_before_it_died() -> None:
    program = (
        doctor._BEGIN
        + "answer(version='1', providers=['a'])\nanswer(providers=[])\nos.kill(os.getpid(), 11)\n"
    )
    assert doctor._probe(program, 60.0) == {
        "version": "1",
        "providers": [],
        "problem": "it was ended by signal 11",
    }


def test_nothing_is_slow_where_everything_is_there(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.pages, "files_get_huge_pages", lambda: True)
    found = doctor.report()
    assert found["slow"] == []
    assert found["infiniband"] == {"adapters": ["mlx5_0"], "device_files": ["uverbs0"]}
    for name in ("ucx", "nixl"):
        assert found["carriers"][name]["infiniband"] == {"possible": True, "reason": None}
    assert found["carriers"]["ucp"]["installed"] is False


def test_a_libibverbs_without_a_provider_for_the_adapter(elsewhere: Elsewhere) -> None:
    elsewhere.devices = [["lo", "tcp"]]
    elsewhere.found["nixl"].update(providers=[], libibverbs="/venv/nixl_cu12.libs/libibverbs-1.so")
    reason = elsewhere.infiniband("nixl")["reason"]
    assert "/venv/nixl_cu12.libs/libibverbs-1.so has no provider for mlx5_0" in reason
    driver = elsewhere.folder / "bus" / "mlx5_core"
    driver.mkdir(parents=True)
    (elsewhere.folder / "sys" / "mlx5_0" / "device").mkdir()
    (elsewhere.folder / "sys" / "mlx5_0" / "device" / "driver").symlink_to(driver)
    assert "has no provider for mlx5_core" in elsewhere.infiniband("nixl")["reason"]
    elsewhere.found["nixl"].update(problem="it was ended by signal 11")  # UCX, which is left without a device
    del elsewhere.found["nixl"]["verbs"]
    assert "has no provider for mlx5_core" in elsewhere.infiniband("nixl")["reason"]
    elsewhere.found["nixl"].update(providers=["mlx5_0"], verbs=True, problem=None)  # there is one, not used
    assert "UCX sees [['lo', 'tcp']], none of ['mlx5_0']" in elsewhere.infiniband("nixl")["reason"]


def test_infiniband_that_is_not_possible(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere.found["ucxx"].update(verbs=False, library="/venv/libucx/lib/libucp.so")
    ucx = elsewhere.infiniband("ucx")
    assert not ucx["possible"]
    assert "UCX 1.21.0 at /venv/libucx/lib/libucp.so is built without verbs" in ucx["reason"]
    assert """after `eval "$(gear-loader ucx-env)"`, or use transport='nixl'.""" in ucx["reason"]
    assert elsewhere.infiniband("nixl")["possible"]
    assert "transport='ucx' goes over TCP between machines" in elsewhere.slow()
    monkeypatch.setenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "true")
    assert "is set, but the wheel's UCX was loaded" in elsewhere.infiniband("ucx")["reason"]
    elsewhere.found["ucxx"].update(UCX)
    elsewhere.devices = [["lo", "tcp"]]
    assert "UCX sees [['lo', 'tcp']], none of ['mlx5_0']" in elsewhere.infiniband("ucx")["reason"]
    for missing, reason in (
        ("dev/uverbs0", "has no uverbs device: load ib_uverbs"),
        ("sys/mlx5_0", "The kernel shows no adapter"),
    ):
        (elsewhere.folder / missing).rmdir()
        assert reason in elsewhere.infiniband("nixl")["reason"]
        assert "one-sided reads over TCP wait for a thread of the owner" in elsewhere.slow()


SLOW: list[tuple[str, dict[str, Any], str]] = [
    ("cuda", {"pinning": False}, "CUDA refuses to pin host memory | raise the locked-memory limit"),
    ("cuda", {"rocm": "6.4.1", "pinning": False}, "copied | this is PyTorch for ROCm"),
    ("cuda", {"available": False}, "are gathered on the CPU | there is no CUDA device (torch 2.13.0)"),
    ("triton", {"problem": "ImportError: x"}, "Triton cannot be imported (ImportError: x)"),
    ("ucxx", {"problem": "it was ended"}, "of other nodes come over plain TCP sockets | ucxx: it was ended"),
    ("ucxx", dict(MISSING), "| pip install '.[ucx]' (in a clone of Gear Loader)"),
]


def test_slow_paths(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    for probe, changed, expected in SLOW:
        with monkeypatch.context() as patch:
            patch.setitem(elsewhere.found, probe, {**WORKS[probe], **changed})
            if changed == MISSING:
                patch.setitem(elsewhere.found, "ucxx", MISSING)
                patch.setitem(elsewhere.found, "nixl", MISSING)
                for name in ("ucx", "nixl"):
                    said = f"It is not installed. pip install '.[{name}]' (in a clone of Gear Loader)."
                    assert elsewhere.infiniband(name)["reason"].endswith(said)
            assert expected in elsewhere.slow()
    for name, value, expected in (
        ("UCX_TLS", "tcp", "UCX_TLS=tcp"),
        ("UCX_POSIX_ERROR_HANDLING", "n", "keeps UCX from shared memory"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert expected in elsewhere.slow()
            assert doctor.report()["environment"][name] == value
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    monkeypatch.setattr(doctor, "_SHM", 1 << 60)
    assert "no more than 8,388,608 bytes may be locked" in elsewhere.slow()
    assert "in Docker --shm-size" in elsewhere.slow()


def test_probes() -> None:
    found = doctor._probe(doctor._PROBES["numba"], 60.0)
    assert found["problem"] is None
    assert found["version"]
    for program, problem in (
        ("import time; time.sleep(60)", "it did not answer within 0.5 s"),
        ("import os; os.abort()", "it was ended by signal 6"),
        ("raise ValueError('no')", "ValueError: no"),
        ("pass", "it gave no answer"),
    ):
        assert doctor._probe(program, 0.5 if "sleep" in program else 30.0) == {"problem": problem}
    program = doctor._BEGIN + "print('noise'); answer(version='1'); import os; os.abort()\n"
    assert doctor._probe(program, 30.0) == {"version": "1", "problem": "it was ended by signal 6"}


def test_the_report_as_text(elsewhere: Elsewhere) -> None:
    elsewhere.found["ucxx"].update(verbs=False)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["TRANSPORT", "VERSION", "DEVICES", "INFINIBAND", "STATE"]
    assert lines[2].split() == [
        "ucx",
        "0.52.00",
        "(UCX",
        "1.21.0)",
        "lo",
        "(tcp),",
        "mlx5_0:1",
        "(ib)",
        "no",
        "works",
    ]
    assert "InfiniBand adapters: mlx5_0" in lines
    assert "CUDA: H200, memory can be pinned; torch 2.13.0" in lines
    expected = "Slow: transport='ucx' goes over TCP between machines, because InfiniBand is not possible."
    assert expected in lines

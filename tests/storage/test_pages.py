"""Where a region's pages lie: huge pages, as smaps shows them, and NUMA nodes, as the system's policy shows them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from options_common import nested_table

import gear_loader as gear
from gear_loader.errors import RegionError, SchemaError
from gear_loader.storage import numa, pages, shared_memory

SCHEMA = {"value": gear.Column(torch.float32, (64,))}
HUGE = pages.HUGE_PAGE


def made(steps: int = 40_000, **options: Any) -> gear.Table:
    """About 10 MiB."""
    return gear.Table.create(
        SCHEMA,
        **nested_table({"max_steps": steps, "max_trajectories": 100, "max_blocks": steps // 64, **options}),
    )


def mapped(table: gear.Table, field: str) -> int:
    """Bytes in a field of /proc/self/smaps, of the mapping in which the region begins."""
    start, inside = base(table), False
    for words in map(str.split, Path("/proc/self/smaps").read_text().splitlines()):
        if not words[0].endswith(":"):
            first, last = (int(word, 16) for word in words[0].split("-"))
            inside = first <= start < last
        elif inside and words[0] == field + ":":
            return int(words[1]) * 1024
    raise AssertionError(field)


def base(table: gear.Table) -> int:
    assert table._engine.region.bytes is not None
    return int(table._engine.region.bytes.ctypes.data)


def can_collapse() -> bool:
    memory, offset = pages.map_private(HUGE)
    with memory:
        memory[offset] = 1
        return pages.collapse(pages.address_of(memory) + offset, HUGE) == (0, 0)


needs_collapse = pytest.mark.skipif(not can_collapse(), reason="this system cannot make huge pages")


@pytest.mark.parametrize("name", [None, "aligned"])
def test_regions_begin_on_a_huge_page_in_every_mapping(name: str | None) -> None:
    with made(name=name) as table:
        assert base(table) % HUGE == 0
        if name:
            assert mapped(table, "Size") >= table._engine.region.layout.region_bytes
            table.unlink()


@needs_collapse
@pytest.mark.parametrize("huge", ["auto", True, False])
def test_a_named_table_has_huge_pages_unless_told_not_to(huge: Any) -> None:
    with made(name="huge", huge_pages=huge) as table:
        table._engine.region.bytes.sum()
        whole = table._engine.region.layout.region_bytes // HUGE * HUGE
        assert mapped(table, "ShmemPmdMapped") == (whole if huge else 0)
        table.unlink()


@pytest.mark.long
@needs_collapse
def test_a_named_table_of_huge_pages_shows_them_in_every_process() -> None:
    assert pages.files_get_huge_pages()
    with made(name="huge") as table:
        whole = table._engine.region.layout.region_bytes // HUGE * HUGE
        assert mapped(table, "ShmemPmdMapped") == whole
        table.add({"value": torch.ones(300, 64)})
        program = f"""
import gear_loader as gear
from test_pages import HUGE, mapped
with gear.Table.attach("huge") as table:
    assert (table[0]["value"] == 1).all()
    touched = table._engine.region.bytes[:{whole}:HUGE].sum()
    print(mapped(table, "ShmemPmdMapped"))
"""
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        found = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": paths, "GEAR_LOADER_DIR": shared_memory.DIRECTORY},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert int(found.stdout) == whole, found.stderr
        table.unlink()


@pytest.mark.skipif(
    not pages.huge_pages_of_memory(), reason="this system has no huge pages for private memory"
)
def test_a_private_table_has_huge_pages_unless_told_not_to() -> None:
    for huge, expected in (("auto", True), (True, True), (False, False)):
        with made(huge_pages=huge) as table:
            table.add({"value": torch.ones(39_000, 64)})
            assert (mapped(table, "AnonHugePages") > 0) is expected


def test_huge_pages_that_cannot_be_had_are_an_error_and_leave_no_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "_chosen", lambda setting: "never")
    with pytest.raises(RegionError, match="gives no huge pages to private memory"):
        made(huge_pages=True)
    for code, why in (
        (errno.EINVAL, "this system cannot make them"),
        (errno.ENOMEM, "fragmented or too full"),
    ):
        monkeypatch.setattr(pages, "collapse", lambda *_, code=code, **__: (HUGE, code))
        with pytest.raises(RegionError, match=rf"2\.0 MiB of .* are not in huge pages: .*{why}"):
            made(name="none", huge_pages=True)
        with pytest.raises(RegionError, match="no table named"):
            gear.Table.attach("none")
    with made(name="none") as table:
        table.unlink()
    with pytest.raises(SchemaError, match="huge_pages is 'yes'; expected 'auto', True or False"):
        made(huge_pages="yes")


def test_pages_are_populated_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PER_THREAD", 1 << 20)  # several threads
    with made() as table:
        table.add({"value": torch.full((100, 64), 7.0)})
        count = table._engine.region.layout.region_bytes
        if not pages.populate(base(table), count):
            pytest.skip("this system cannot populate")
        assert mapped(table, "Rss") >= count
        assert (table[0]["value"] == 7).all()


RESERVED = Path("/proc/sys/vm/nr_hugepages")


@pytest.fixture
def hugetlbfs(tmp_path: Path) -> Iterator[Path]:
    """A directory on a hugetlbfs, for which 8 pages are set aside."""
    if os.geteuid() or not RESERVED.exists():
        pytest.skip("setting huge pages aside needs root")
    before = int(RESERVED.read_text())
    try:
        RESERVED.write_text(str(before + 8))
        if int(RESERVED.read_text()) < before + 8:
            pytest.skip("this machine's memory is too fragmented for huge pages")
        if subprocess.run(
            ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M,size=16M", "none", tmp_path]
        ).returncode:
            pytest.skip("a hugetlbfs cannot be mounted here")
        try:
            folder = tmp_path / "tables"
            folder.mkdir(0o700)
            yield folder
        finally:
            subprocess.run(["umount", tmp_path], check=True)
    except OSError as error:
        pytest.skip(f"huge pages cannot be set aside here: {error}")
    finally:
        with contextlib.suppress(OSError):
            RESERVED.write_text(str(before))


@pytest.mark.long
def test_named_tables_lie_on_a_hugetlbfs(hugetlbfs: Path) -> None:
    attach = """
import os, torch, gear_loader as gear
with gear.Table.attach("reserved") as table:
    mapping = table._engine.region._mapping
    assert mapping.offset + os.fstat(mapping.fd).st_size <= len(mapping.memory), "whole pages of the file are mapped"
    assert (table[0]["value"] == 1).all()
    table.add({"value": torch.full((300, 64), 2.0)})
"""
    program = f"""
import subprocess, sys
import pytest, torch, gear_loader as gear
from gear_loader.errors import RegionError
from test_pages import HUGE, SCHEMA, made, mapped
with made(12_000, name="reserved") as table:
    assert mapped(table, "KernelPageSize") == HUGE
    table.add({{"value": torch.ones(300, 64)}})
    subprocess.run([sys.executable, "-c", {attach!r}], check=True)
    batch = gear.ReplayDataset(table, batch_size=2, windows=gear.Window(4), sampler=gear.Fifo(), prefetch=0).sample()
    assert batch["value"][:, 0, 0].tolist() == [1, 2]
    table.check_valid()
    with pytest.raises(RegionError, match="does not fit .* enlarge it .sysctl vm.nr_hugepages"):
        made(900_000, name="larger")
names = [sys.executable, "-m", "gear_loader"]
assert "reserved" in subprocess.run([*names, "ls"], check=True, capture_output=True, text=True).stdout
subprocess.run([*names, "rm", "reserved"], check=True, stdin=subprocess.DEVNULL)
with pytest.raises(RegionError, match="no table named"):
    gear.Table.attach("reserved")
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "GEAR_LOADER_DIR": str(hugetlbfs)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


# ---------------------------------------------------------------- NUMA


def tree(folder: Path, *, memory: str, gpus: dict[str, int]) -> Path:
    """A synthetic /sys, with a network card and GPUs by PCI address and node."""
    nodes = folder / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "has_memory").write_text(memory + "\n")
    for address, (vendor, kind, node) in {
        "0000:00:1f.0": ("0x8086", "0x020000", 0),
        **{address: ("0x10de", "0x030200", node) for address, node in gpus.items()},
    }.items():
        device = folder / "bus/pci/devices" / address
        device.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            (device / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("memory", "gpus", "auto"),
    [
        ("0-1", {"0000:4f:00.0": 1, "0000:50:00.0": 1}, 1),
        ("0-1", {"0000:17:00.0": 0, "0000:4f:00.0": 1}, None),
        ("0-1", {"0000:4f:00.0": -1}, None),
        ("0,2-3", {"0000:4f:00.0": 3}, 3),
        ("0", {"0000:4f:00.0": 0}, None),
        ("0-1", {}, None),
    ],
)
def test_auto_is_the_node_of_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, gpus: dict[str, int], auto: int | None
) -> None:
    monkeypatch.setattr(numa, "SYS", tree(tmp_path, memory=memory, gpus=gpus))
    assert numa.check_numa("auto") == auto
    assert numa.check_numa(None) is None
    assert numa.gpu_nodes() == {address: node for address, node in gpus.items() if node >= 0}
    known = numa.nodes_with_memory()
    assert numa.check_numa(known[-1]) == known[-1]
    for wrong in (known[-1] + 1, -1, True, 0.0, "0"):
        with pytest.raises(SchemaError, match="expected 'auto', None, or a NUMA node with memory"):
            numa.check_numa(wrong)


def test_a_device_s_node_is_that_of_its_pci_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        numa, "SYS", tree(tmp_path, memory="0-1", gpus={"0000:4f:00.0": 1, "0000:17:00.0": 0})
    )

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGet(self, device: Any, index: int) -> int:
            device._obj.value = index
            return 0

        def cuDeviceGetPCIBusId(self, address: Any, size: int, device: Any) -> int:
            address.value = [b"0000:17:00.0", b"0000:4F:00.0"][device.value]
            return 0

    monkeypatch.setattr(numa.ctypes, "CDLL", Driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [numa.node_of_gpu(index) for index in (0, 1)] == [0, 1]
    assert numa.check_numa("auto") == 1


def test_a_node_that_does_not_exist_is_an_error_before_anything_is_made() -> None:
    with pytest.raises(SchemaError, match="numa is 1023; expected"):
        made(name="nowhere", numa=1023)
    with pytest.raises(RegionError, match="no table named"):
        gear.Table.attach("nowhere")


def policy_of(address: int) -> tuple[int, list[int]] | None:
    """Mode and nodes of the policy for memory at an address, or None if the system does not tell."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    if numa._call(1, ctypes.byref(mode), mask, 1024, address, 2):  # get_mempolicy, MPOL_F_ADDR
        return None
    return mode.value, [node for node in range(1024) if mask[node // 64] >> node % 64 & 1]


@pytest.mark.skipif(policy_of(id(None)) is None, reason="this system does not tell policies")
@pytest.mark.parametrize("name", [None, "on-node"])
def test_memory_prefers_the_given_node(name: str | None) -> None:
    node = (numa.nodes_with_memory() or [0])[0]
    with made(name=name, numa=node) as table:
        table.add({"value": torch.ones(300, 64)})
        start, count = base(table), table._engine.region.layout.region_bytes
        for address in (start, start + count - 1):
            assert policy_of(address) == (1, [node])
        assert list(numa.nodes_of([start])) == [node]
        if name:
            with gear.Table.attach(name) as other:
                assert policy_of(base(other)) == (1, [node])
            table.unlink()
    with made(numa=None) as table:
        assert policy_of(base(table)) != (1, [node])

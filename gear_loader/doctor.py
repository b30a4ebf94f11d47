"""Report of the transports of this machine, and of every slow path with its cause and remedy.

Each third-party library is loaded in a separate process with a deadline, so a crash or hang becomes a finding.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import platform
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gear_loader.errors import RegionError
from gear_loader.storage import numa, pages, shared_memory
from gear_loader.storage.layout import read_counters
from gear_loader.storage.tier_counts import SLOW_SHARE
from gear_loader.storage.tier_state import TierState
from gear_loader.transport.child_process import child_command

__all__ = ["report"]

_DEADLINE = 60.0  # seconds for a probe
_MARK = "gear-loader-doctor:"
_NO_DEVICE = "gear-loader-asks"  # not a device: UCX answers with a list of the existing ones
_DEVICE = re.compile(r"'([^']+)'\((\w+)\)")
_MEMLOCK = 1 << 30  # bytes; a lower limit of locked memory is reported
_SHM = 1 << 30  # bytes; less shared memory is reported
_INSTALL = "pip install '.[{}]' (in a clone of Gear Loader)"
_SYS, _DEV = Path("/sys/class/infiniband"), Path("/dev/infiniband")

# Each probe prints JSON objects after the mark, because UCX and NIXL write other lines to standard output: what one
# prints early is known also if the library ends the process.
_BEGIN = f"""
import json, os, re
def answer(**found): print({_MARK!r} + json.dumps(found), flush=True)
def ucx_libraries():
    with open("/proc/self/maps") as maps:
        return sorted({{line.split()[-1] for line in maps if re.search(r"/libuc[pt][^/]*\\.so", line)}})
def has_verbs():
    folders = {{os.path.join(os.path.dirname(path), "ucx") for path in ucx_libraries() if "/libucp" in path}}
    names = [name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]
    return any(name.startswith("libuct_ib") for name in names)
def seen_by_verbs():
    # the devices for which the loaded libibverbs has a provider, and its path; it may not be loaded
    with open("/proc/self/maps") as maps:
        paths = sorted({{line.split()[-1] for line in maps if "/libibverbs" in line}})
    if not paths:
        return dict(providers=None, libibverbs="")
    import ctypes
    library, count = ctypes.CDLL(paths[0]), ctypes.c_int()
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_name.restype, library.ibv_get_device_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    devices = library.ibv_get_device_list(ctypes.byref(count))
    names = [library.ibv_get_device_name(devices[i]).decode() for i in range(count.value)]
    return dict(providers=names, libibverbs=paths[0])
"""
_PROBES = {
    "ucxx": _BEGIN
    + """
import ucxx
from ucxx._lib.libucxx import UCXContext
version = tuple(ucxx.get_ucx_version())
info = UCXContext({"RCACHE_ENABLE": "y"} if version < (1, 22) else {}).info  # as ucx_library starts it
answer(version=ucxx.__version__, ucx=".".join(map(str, version)), verbs=has_verbs(),
       library=next(iter(path for path in ucx_libraries() if "/libucp" in path), ""),
       transports=sorted(set(re.findall(r"resource.*-- (\\S+)/\\S+", info))), **seen_by_verbs())
""",
    "ucp": _BEGIN
    + """
import ucp
answer(version=ucp.__version__, ucx=".".join(map(str, ucp.get_ucx_version())), verbs=has_verbs(),
       library=next(iter(path for path in ucx_libraries() if "/libucp" in path), ""),
       transports=sorted(ucp.get_active_transports()))
""",
    "nixl": _BEGIN
    + """
import ctypes, glob, importlib.util
from gear_loader.transport import nixl_agent
package = nixl_agent.installed()
if package is not None:
    site = os.path.dirname(os.path.dirname(importlib.util.find_spec(package).origin))
    for path in glob.glob(os.path.join(site, package + ".libs", "libibverbs*")):
        ctypes.CDLL(path)  # the one that its UCX will use
    answer(version=nixl_agent.version(), **seen_by_verbs())
agent = nixl_agent.new_agent("gear-loader-doctor", loopback=False)
answer(version=nixl_agent.version(), plugins=sorted(agent.get_plugin_list()), verbs=has_verbs(),
       library=next(iter(path for path in ucx_libraries() if "/libucp" in path), ""), **seen_by_verbs())
""",
    "cuda": _BEGIN
    + """
import torch
found = {"torch": torch.__version__, "available": torch.cuda.is_available(), "devices": [], "pinning": None}
found["rocm"] = torch.version.hip
if found["available"]:
    import mmap
    found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    torch.cuda.init()
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 1 << 20, 1))
    from gear_loader.utils.driver import reads_pageable_memory
    found["pinning"] = code == 0 or reads_pageable_memory(torch.cuda.current_device(), code)
    if code == 0:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
answer(**found)
""",
    "triton": _BEGIN + "import triton\nanswer(version=triton.__version__)\n",
    "numba": _BEGIN + "import numba\nanswer(version=numba.__version__)\n",
}
_NAMES = {
    # UCX lists its devices in the warning about an unknown one.
    "ucxx": "from ucxx._lib.libucxx import UCXContext\nUCXContext({})\n",
    "nixl": "from gear_loader.transport.nixl_agent import new_agent\nnew_agent('gear-loader-doctor', loopback=False)\n",
}


def report(*, deadline: float = _DEADLINE) -> dict[str, Any]:
    """Collect the report as plain data.

    Args:
        deadline: seconds after which a probe is ended and reported as hanging.

    Returns:
        A dictionary with:

        - ``machine``: system, Python, cores;
        - ``carriers``: for ``socket``, ``ucx`` (through ``ucxx``), ``ucp`` (ucx-py) and ``nixl``: ``installed``,
          ``version``, ``problem`` (None, or why it cannot be used), ``devices`` as [name, transport], and
          ``infiniband``: ``possible``, and ``reason`` with the remedy;
        - ``infiniband``: ``adapters`` and ``device_files``;
        - ``memory``: ``locked_limit`` in bytes (None: no limit), ``shm_bytes`` and ``shm_free``; ``huge_private`` and
          ``huge_named``: whether such tables get pages of 2 MiB; ``huge_mount``: the mount option ``huge=``, or
          ``"hugetlb"``; NUMA ``nodes`` with memory, ``gpu_nodes`` by PCI address, and ``table_nodes``: table -> node ->
          sampled pages; ``disks``: table with a disk tier -> its state;
        - ``cuda``, ``triton``, ``numba``;
        - ``environment``: variables UCX_*, NIXL_* and RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY that are set;
        - ``slow``: for each slow path ``what``, ``why`` and ``remedy``, without full stops at their ends.
    """
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        probes = {name: pool.submit(_probe, program, deadline) for name, program in _PROBES.items()}
        listed = {name: pool.submit(_devices, program, deadline) for name, program in _NAMES.items()}
        found = {name: each.result() for name, each in probes.items()}
        devices = {name: each.result() for name, each in listed.items()}
    adapters, files = _listed(_SYS), [name for name in _listed(_DEV) if name.startswith("uverbs")]
    carriers = {
        "socket": {"installed": True, "version": f"Python {platform.python_version()}", "problem": None},
        "ucx": _carrier(found["ucxx"], devices["ucxx"]),
        "ucp": _carrier(found["ucp"], []),
        "nixl": _carrier(found["nixl"], devices["nixl"]),
    }
    carriers["socket"]["devices"] = [[name, "tcp"] for name in _listed(Path("/sys/class/net"))]
    carriers["socket"]["infiniband"] = {
        "possible": False,
        "reason": "Plain sockets use TCP: over InfiniBand only as IP over InfiniBand.",
    }
    for name in ("ucx", "ucp", "nixl"):
        carriers[name]["infiniband"] = _infiniband(name, carriers[name], adapters, files)
    result = {
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "carriers": carriers,
        "infiniband": {"adapters": adapters, "device_files": files},
        "memory": _memory(),
        "cuda": found["cuda"],
        "triton": found["triton"],
        "numba": found["numba"],
        "environment": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("UCX_", "NIXL_")) or key == "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
        },
    }
    result["slow"] = _slow(result)
    return result


# ---------------------------------------------------------------- probes


def _run(program: str, deadline: float, **environment: str) -> tuple[str, str | None]:
    """Run a program in a child process; returns its output, and why it failed, or None."""
    try:
        done = subprocess.run(
            child_command("-c", program),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=deadline,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"it did not answer within {deadline:g} s"
    except OSError as error:
        return "", str(error)
    text = done.stdout.decode(errors="replace")
    if done.returncode < 0:
        return text, f"it was ended by signal {-done.returncode}"
    lines = text.strip().splitlines() or [f"it ended with code {done.returncode}"]
    return text, None if done.returncode == 0 else lines[-1]


def _probe(program: str, deadline: float) -> dict[str, Any]:
    """Run a probe; returns its answers as one, with `problem`, which is None after a success."""
    text, problem = _run(program, deadline)
    answers = [json.loads(line[len(_MARK) :]) for line in text.splitlines() if line.startswith(_MARK)]
    found: dict[str, Any] = {key: value for answer in answers for key, value in answer.items()}
    return {**found, "problem": problem or (None if answers else "it gave no answer")}


def _devices(program: str, deadline: float) -> list[list[str]]:
    """Network devices of a library's UCX, as [name, transport]."""
    text, _ = _run(program, deadline, UCX_NET_DEVICES=_NO_DEVICE, UCX_LOG_LEVEL="warn")
    lines = [line for line in text.splitlines() if _NO_DEVICE in line]
    return [list(pair) for pair in sorted({pair for line in lines for pair in _DEVICE.findall(line)})]


def _carrier(found: dict[str, Any], devices: list[list[str]]) -> dict[str, Any]:
    missing = "No module named" in str(found["problem"]) or "is not installed" in str(found["problem"])
    rest = {key: value for key, value in found.items() if key not in ("version", "problem")}
    return {
        "installed": not missing,
        "version": found.get("version"),
        "problem": "It is not installed." if missing else found["problem"],
        "devices": devices,
        **rest,
    }


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _memory() -> dict[str, Any]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found: dict[str, Any] = {"locked_limit": None if soft == resource.RLIM_INFINITY else soft}
    try:
        found["shm_bytes"], found["shm_free"] = pages.space_of_files()
    except OSError as error:
        found["shm_bytes"] = found["shm_free"] = 0
        found["shm_problem"] = str(error)
    found["huge_private"] = pages.huge_pages_of_memory()
    there = "shm_problem" not in found
    found["huge_named"] = there and pages.files_get_huge_pages()
    found["huge_mount"] = pages.huge_pages_of_files() if there else "never"
    found["nodes"], found["gpu_nodes"] = numa.nodes_with_memory(), numa.gpu_nodes()
    found["table_nodes"] = _of_tables(_nodes) if there else {}
    tiers = _of_tables(_tier) if there else {}
    found["disks"] = {name: str(tier) for name, tier in tiers.items()}
    found["slow_disks"] = {
        name: tier.disk_wait for name, tier in tiers.items() if tier.disk_wait >= SLOW_SHARE
    }
    return found


def _of_tables(look: Callable[[Any], Any]) -> dict[str, Any]:
    """Name of a table of this user -> what `look` finds in its file, unless that is None."""
    found = {}
    for name in shared_memory.region_names():
        with (
            contextlib.suppress(OSError, RegionError),
            shared_memory.opened(shared_memory.region_path(name)) as file,
        ):
            shared_memory.check_own(file.info, name)
            if (seen := look(file)) is not None:
                found[name] = seen
    return found


def _tier(file: Any) -> TierState | None:
    """What lies on disk of a table with a disk tier, and what was read from it."""
    return TierState.read(file.fd, *read_counters(file.fd, file.info.st_size))


def _nodes(file: Any) -> dict[int, int] | None:
    """NUMA node -> number of sampled pages on it, of a table that this process has not attached."""
    # Closing a mapping of one that this process has attached would release its lock.
    if file.ours or os.pread(file.fd, len(shared_memory.MAGIC), 0) != shared_memory.MAGIC:
        return None
    return numa.nodes_of_file(file.fd, file.info.st_size)


# ---------------------------------------------------------------- conclusions


def _infiniband(name: str, carrier: dict[str, Any], adapters: list[str], files: list[str]) -> dict[str, Any]:
    """Whether a carrier can use InfiniBand, and the remedy if it cannot."""
    reasons = []
    if not adapters:
        reasons.append(
            f"The kernel shows no adapter ({_SYS} is empty or missing): install one with its driver (rdma-core; for "
            "NVIDIA's, mlx5_ib)."
        )
    elif not files:
        reasons.append(
            f"{_DEV} has no uverbs device: load ib_uverbs; in a container pass --device={_DEV} and --cap-add=IPC_LOCK."
        )
    without_provider = bool(adapters and files) and carrier.get("providers") == []
    if not carrier["installed"] or (carrier["problem"] and not without_provider):
        remedy = "ucxx has taken its place." if name == "ucp" else f"{_INSTALL.format(name)}."
        reasons.append(f"{_phrase(carrier['problem'])}. {remedy}")
    elif not carrier.get("verbs") and not without_provider:
        reasons.append(_no_verbs(carrier))
    elif without_provider:  # UCX, left without a device, may have ended the probe
        drivers = sorted({_driver(adapter) for adapter in adapters})
        reasons.append(
            f"The kernel shows {adapters}, but {carrier['libibverbs']} has no provider for {' or '.join(drivers)}: the "
            "libibverbs of a wheel brings those of a few vendors and looks for no others. Put a link to the system's "
            "libibverbs.so.1 (package ibverbs-providers for the provider) in its place."
        )
    elif (
        adapters and files and not any(device.startswith(tuple(adapters)) for device, _ in carrier["devices"])
    ):
        reasons.append(
            f"UCX sees {carrier['devices'] or 'no device'}, none of {adapters}: look at UCX_TLS and UCX_NET_DEVICES, "
            "and whether a port is active (ibv_devinfo)."
        )
    return {"possible": not reasons, "reason": " ".join(reasons) or None}


def _driver(adapter: str) -> str:
    """The kernel's driver of an adapter; software adapters have none, so then the adapter's name."""
    try:
        return (_SYS / adapter / "device" / "driver").resolve(strict=True).name
    except OSError:
        return adapter


def _phrase(text: Any) -> str:
    """A text without the full stop at its end, for use in a sentence."""
    return str(text).strip().rstrip(".")


def _no_verbs(carrier: dict[str, Any]) -> str:
    asked = os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() == "true"
    if asked and "/libucx/" in str(carrier.get("library")):
        return (
            "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true is set, but the wheel's UCX was loaded: the system has no "
            "libucp.so without a version in its name, which the -dev package of UCX (1.19 or newer) brings."
        )
    return (
        f"UCX {carrier.get('ucx', '')} at {carrier.get('library') or 'an unknown place'} is built without verbs, as "
        "the wheel libucx is. NIXL's wheel brings one with verbs: install it and start training after "
        "`eval \"$(gear-loader ucx-env)\"`, or use transport='nixl'. Or install the system's UCX, 1.19 or newer with "
        "verbs and its -dev package, and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true."
    )


def _slow(found: dict[str, Any]) -> list[dict[str, str]]:
    """Every slow path with its cause and remedy."""
    slow: list[dict[str, str]] = []

    def add(when: Any, what: str, why: str, remedy: str) -> None:
        if when:
            slow.append({"what": what, "why": _phrase(why), "remedy": _phrase(remedy)})

    cuda, memory, carriers = found["cuda"], found["memory"], found["carriers"]
    ucx, nixl, environment = carriers["ucx"], carriers["nixl"], found["environment"]
    gpu = bool(cuda.get("available"))
    add(
        not gpu,
        "batches are gathered on the CPU",
        f"there is no CUDA device (torch {cuda.get('torch', 'unknown')}"
        + (f": {_phrase(cuda['problem'])})" if cuda["problem"] else ")"),
        "on a machine with a GPU, install torch's CUDA build",
    )
    add(
        gpu and cuda.get("rocm"),
        "a GPU's batches are gathered on the CPU and copied",
        "this is PyTorch for ROCm, on which the kernels have not run yet",
        "nothing: batches are the same",
    )
    add(
        gpu and not cuda.get("rocm") and not cuda.get("pinning"),
        "a GPU's batches are gathered on the CPU and copied",
        "CUDA refuses to pin host memory",
        "raise the locked-memory limit (ulimit -l unlimited) or the container's memory",
    )
    add(
        gpu and found["triton"]["problem"],
        "a GPU's batches are gathered on the CPU and copied",
        f"Triton cannot be imported ({_phrase(found['triton']['problem'])})",
        "pip install triton",
    )
    ucx_works, nixl_works = not ucx["problem"], not nixl["problem"]
    add(
        not ucx_works and carriers["ucp"]["problem"],
        "rows of other nodes come over plain TCP sockets",
        f"ucxx: {ucx['problem']}",
        _INSTALL.format("ucx"),
    )
    for name, works in (("ucx", ucx_works), ("nixl", nixl_works)):
        add(
            works and not carriers[name]["infiniband"]["possible"],
            f"transport='{name}' goes over TCP between machines",
            "InfiniBand is not possible",
            carriers[name]["infiniband"]["reason"] or "",
        )
    add(
        nixl_works and not nixl["infiniband"]["possible"],
        "one-sided reads over TCP wait for a thread of the owner, up to 5 ms",
        "without InfiniBand UCX emulates them",
        "use transport='ucx' there",
    )
    add(
        (ucx_works or nixl_works) and environment.get("UCX_POSIX_ERROR_HANDLING", "y") == "n",
        "transport='ucx' goes over TCP between processes of one machine",
        "UCX_POSIX_ERROR_HANDLING=n keeps UCX from shared memory",
        "unset it",
    )
    add(
        environment.get("UCX_TLS") not in (None, "all"),
        "UCX uses only the transports in UCX_TLS",
        f"UCX_TLS={environment.get('UCX_TLS')}",
        "unset it, unless this is intended",
    )
    limit = memory["locked_limit"]
    add(
        limit is not None and limit < _MEMLOCK and (gpu or found["infiniband"]["adapters"]),
        "pinning and registering memory may be refused",
        f"no more than {limit or 0:,} bytes may be locked",
        "ulimit -l unlimited; in a container --ulimit memlock=-1",
    )
    nodes = set(memory["gpu_nodes"].values())
    far = sorted(name for name, on in memory["table_nodes"].items() if nodes and set(on) - nodes)
    add(
        len(memory["nodes"]) > 1 and far,
        f"a GPU reads the tables {', '.join(far)} through the link between processors",
        f"the GPUs are on the NUMA nodes {sorted(nodes)}, and pages of these tables on others",
        "create them with numa=<node of the GPU>, or 'auto' after torch.cuda.init(), with enough free memory there",
    )
    for name, share in memory["slow_disks"].items():
        add(
            True,
            f"batches of table {name} wait for its disk",
            f"{share:.0%} of ten seconds was spent reading from it",
            "give the table more memory, draw by priority, or use a faster disk (docs/tiers.md)",
        )
    add(
        not memory["huge_named"],
        "named tables lie in pages of 4 KiB",
        f"{shared_memory.DIRECTORY} gives no huge pages (huge={memory['huge_mount']})",
        f"use Linux 6.1 or newer, or mount -o remount,huge=within_size {shared_memory.DIRECTORY}, or GEAR_LOADER_DIR "
        "on a hugetlbfs",
    )
    add(
        memory["shm_bytes"] < _SHM,
        "shared memory for named tables is small",
        f"{shared_memory.DIRECTORY} has {memory['shm_bytes']:,} bytes",
        f"in Docker --shm-size; else mount -o remount,size=... {shared_memory.DIRECTORY}, or GEAR_LOADER_DIR "
        "on a larger tmpfs",
    )
    return slow

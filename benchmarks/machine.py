"""What a measurement was made on: the machine, the versions, the code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]

_CPU = Path("/sys/devices/system/cpu/cpu0/cache")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def describe() -> dict[str, Any]:
    """CPU, memory and GPU. Names no host and no user."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "last_level_cache_bytes": cache_bytes(),
        "huge_pages": _chosen(_read(_HUGE_PAGES)),
        "load": round(os.getloadavg()[0], 2),
        "gpu": _gpu(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what takes part; None for a package that is not there or cannot be imported."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "numpy", "numba"):
        try:
            __import__(name)
            found[name] = importlib.metadata.version(name)
        except Exception:  # numba raises several kinds where it does not fit numpy
            found[name] = None
    found["cuda"] = torch.version.cuda
    return found


def code() -> dict[str, Any]:
    """Which code was measured: the commit, whether files differ from it, and a hash of the files themselves.

    Where there is no repository, as in an archive, the commit comes from the environment variable GEAR_LOADER_COMMIT.
    """
    commit = _run("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if commit is not None:
        dirty: bool | None = bool(_run("git", "-C", str(ROOT), "status", "--porcelain", "--", *_SOURCES))
    else:
        commit, dirty = os.environ.get("GEAR_LOADER_COMMIT") or None, None
    return {"commit": commit, "dirty": dirty, "source": _hash()}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_bytes() -> int:
    """Memory that can be had now, as the system reports it."""
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cache_bytes() -> int | None:
    """Size of the largest cache, as the system reports it (a virtual machine may share it with others)."""
    sizes = [_bytes(_read(path)) for path in sorted(_CPU.glob("index*/size"))]
    return max((size for size in sizes if size is not None), default=None)


_SOURCES = ("gear_loader", "triton_kernels", "benchmarks/*.py")


def _hash() -> str:
    digest = hashlib.sha256()
    for folder in ("gear_loader", "triton_kernels", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent == ROOT / "gear_loader" / "kernels":
                continue  # triton_kernels once more
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_model() -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, str] | None:
    if not torch.cuda.is_available():
        return None
    fields = ("driver_version", "pcie.link.gen.current", "pcie.link.width.current")
    answer = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0")
    values = answer.split(",") if answer else []
    return {"name": torch.cuda.get_device_name()} | {
        field: value.strip() for field, value in zip(fields, values, strict=False)
    }


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _bytes(text: str) -> int | None:
    number, unit = text[:-1], text[-1:]
    return int(number) * _UNITS[unit] if number.isdigit() and unit in _UNITS else None


def _chosen(text: str) -> str | None:
    return text.partition("[")[2].partition("]")[0] or None

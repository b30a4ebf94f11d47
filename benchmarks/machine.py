"""What a measurement was made on: the machine, the versions, the code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """CPU, memory and GPU. Names no host and no user."""
    model = re.search(r"^model name\s*:\s*(.*)", _read("/proc/cpuinfo"), re.MULTILINE)
    pages = re.search(r"\[(.+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_bytes": _memory_bytes(),
        "last_level_cache_bytes": cache_bytes(),
        "huge_pages": pages[1] if pages else None,
        "load": round(os.getloadavg()[0], 2),
        "gpu": _gpu(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what takes part; None for a package that is not there or cannot be imported."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "numpy", "numba"):
        found[name] = None
        with contextlib.suppress(Exception):  # numba raises several kinds where it does not fit numpy
            importlib.import_module(name)
            found[name] = importlib.metadata.version(name)
    found["cuda"] = torch.version.cuda
    return found


def code() -> dict[str, Any]:
    """Which code was measured: the commit, whether files differ from it, and a hash of the files themselves.

    Where there is no repository, as in an archive, the commit comes from the environment variable GEAR_LOADER_COMMIT.
    """
    digest = hashlib.sha256()
    for folder in ("gear_loader", "triton_kernels", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent != ROOT / "gear_loader" / "kernels":  # triton_kernels once more
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    git, sources = ("git", "-C", str(ROOT)), ("gear_loader", "triton_kernels", "benchmarks/*.py")
    commit = _run(*git, "rev-parse", "HEAD")
    dirty = None if commit is None else bool(_run(*git, "status", "--porcelain", "--", *sources))
    commit = commit or os.environ.get("GEAR_LOADER_COMMIT") or None
    return {"commit": commit, "dirty": dirty, "source": digest.hexdigest()[:16]}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Memory that can be had now, as the system reports it."""
    found = re.search(r"^MemAvailable:\s*(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else _memory_bytes()


def cache_bytes() -> int | None:
    """Size of the largest cache, as the system reports it (a virtual machine may share it with others)."""
    texts = map(_read, Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    found = [re.fullmatch(r"(\d+)([KMG])", text) for text in texts]
    return max((int(one[1]) << {"K": 10, "M": 20, "G": 30}[one[2]] for one in found if one), default=None)


def _gpu() -> dict[str, str] | None:
    if not torch.cuda.is_available():
        return None
    fields = ("driver_version", "pcie.link.gen.current", "pcie.link.width.current")
    answer = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0")
    values = [value.strip() for value in answer.split(",")] if answer else []
    return {"name": torch.cuda.get_device_name(), **dict(zip(fields, values, strict=False))}


def _run(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()
    return None


def _read(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""

"""ucxx with the UCX of NIXL's wheel, which has verbs: InfiniBand for `transport="ucx"` from pip alone.

The wheel libucx, on which ucxx depends, is built without verbs; NIXL's brings a UCX with them, its libraries renamed. A
folder with links of the usual names to those, first on the loader's path, makes ucxx load them instead: UCX keeps the
names and calls of its libraries in all versions 1.x. ucxx and NIXL then share one UCX.

Tried with ucxx 0.52 and the UCX 1.23 of NIXL 1.5.1.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from pathlib import Path

from gear_loader.errors import TransportError
from gear_loader.transport.nixl_agent import installed

_LIBRARIES = ("ucm", "ucs", "uct", "ucp")


def links_folder() -> Path:
    """The folder of this user's links: gear-loader/ucx in $XDG_CACHE_HOME, or in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "gear-loader" / "ucx"


def link_ucx(folder: Path) -> dict[str, str]:
    """Make the links, or bring them up to date.

    Args:
        folder: for the links; it is made if it does not exist. Links of an earlier version are replaced one by one.

    Returns:
        Environment variables for processes that are to use them. The loader reads them when a process starts.

    Raises:
        TransportError: NIXL is not installed from a wheel. OSError: the folder cannot be written.
    """
    libraries = _libraries_of_nixl()
    links: dict[str, Path] = {path.name: path for path in libraries.glob("*.so*")}
    for name in _LIBRARIES:
        found = sorted(libraries.glob(f"lib{name}-*.so*"))
        if len(found) != 1:
            raise TransportError(
                f"{libraries} has {len(found)} libraries lib{name}-*.so*; expected one, as NIXL 1.5.1 has. Use "
                "the system's UCX, 1.19 or newer with verbs and its -dev package, instead."
            )
        links |= {f"lib{name}.so": found[0], f"lib{name}.so.0": found[0]}
        if name == "ucs":  # its handlers of signals are in there; the wheel's would bring a second libucs
            links["libucs_signal.so"] = found[0]
    for path in (libraries / "ucx").glob("*.so*"):
        plain = path.name.partition(".so")[0] + ".so"
        links |= {f"ucx/{name}": path for name in (plain, f"{plain}.0", path.name)}
    (folder / "ucx").mkdir(parents=True, exist_ok=True)
    for name, target in links.items():
        _link(folder / name, target)
    before = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    search = ":".join([str(folder), *(part for part in before if part not in ("", str(folder)))])
    return {"LD_LIBRARY_PATH": search, "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"}


def _libraries_of_nixl() -> Path:
    package = installed()
    found = None if package is None else importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise TransportError(
            "NIXL, whose UCX has verbs, is not installed: pip install '.[nixl]' (in a clone of Gear Loader)."
        )
    inside = Path(found.submodule_search_locations[0])
    libraries = inside.parent / f"{inside.name}.libs"
    if not (libraries / "ucx").is_dir():
        raise TransportError(
            f"{libraries}/ucx does not exist: NIXL was not installed from its wheel, which brings a UCX with verbs."
        )
    return libraries


def _link(link: Path, target: Path) -> None:
    """Make or replace one link. A process that loads it meanwhile finds the old or the new one."""
    if link.is_symlink() and os.readlink(link) == str(target):
        return
    temporary = link.with_name(f".{link.name}-{secrets.token_hex(8)}")
    temporary.symlink_to(target)
    temporary.replace(link)

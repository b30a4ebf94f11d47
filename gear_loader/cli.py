"""The command line: which tables lie in shared memory, and removing those that nobody uses any more.

Nothing here changes a table or waits for its lock. torch is loaded only where there is a table to be described.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pwd
import stat
import struct
import time
from typing import Annotated, Any

import typer

from gear_loader import names
from gear_loader.errors import RegionError

__all__ = ["app"]

app = typer.Typer(
    help="Gear Loader: tables in shared memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _main() -> None:
    """Gear Loader: tables in shared memory."""


# ---------------------------------------------------------------- ls


@dataclasses.dataclass
class _Entry:
    """One file of the listing. What is None is not known: the file is no table that can be read."""

    name: str
    path: str
    bytes: int
    created: str
    owner: str
    in_use: bool | None = None
    processes: list[int] = dataclasses.field(default_factory=list)
    problem: str | None = None
    trajectories: int | None = None
    steps: int | None = None
    max_trajectories: int | None = None
    max_steps: int | None = None
    columns: dict[str, dict[str, Any]] | None = None


@app.command("ls")
def list_tables(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array, one object a table.")] = False,
) -> None:
    """List the named tables of this machine, those in use and those that were left over."""
    entries = _entries()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2))
    elif not entries:
        typer.echo(f"No tables in {names.DIRECTORY}.")
    else:
        _print(entries)


def _entries() -> list[_Entry]:
    infos: dict[str, os.stat_result] = {}
    for name in _region_names():
        try:
            infos[name] = os.stat(_path(name), follow_symlinks=False)
        except FileNotFoundError:  # removed meanwhile
            continue
    users = names.users({(info.st_dev, info.st_ino) for info in infos.values()})
    return [_entry(name, info, users[info.st_dev, info.st_ino]) for name, info in infos.items()]


def _entry(name: str, info: os.stat_result, pids: list[int]) -> _Entry:
    created = datetime.datetime.fromtimestamp(info.st_mtime, datetime.timezone.utc)
    entry = _Entry(
        name=name,
        path=_path(name),
        bytes=info.st_size,
        created=created.isoformat(timespec="seconds"),
        owner=_user(info.st_uid),
        in_use=True if pids else None,
        processes=pids,
    )
    if not stat.S_ISREG(info.st_mode):
        entry.problem = "It is not a regular file, and so no table."
        return entry
    try:
        with names.opened(entry.path) as file:
            try:
                _describe(entry, file)
            except RegionError as error:
                entry.problem = str(error)
            if not pids:
                entry.in_use = not file.lock()
    except OSError as error:
        entry.problem = f"It cannot be read: {error}."
    return entry


def _describe(entry: _Entry, file: names.OpenFile) -> None:
    # Here, because they load torch: what is called damaged is exactly what cannot be attached.
    from gear_loader.index_ops import NUM_READY, NUM_STEPS
    from gear_loader.layout import HEADER_LIMIT, Layout

    layout = Layout.read(os.pread(file.fd, HEADER_LIMIT, 0), file.info.st_size, "It")
    offset, dtype, (count,) = layout.arrays["counters"]
    counters = struct.unpack(f"={count}q", os.pread(file.fd, count * dtype.itemsize, offset))
    entry.trajectories, entry.steps = counters[NUM_READY], counters[NUM_STEPS]
    entry.max_trajectories, entry.max_steps = layout.max_trajectories, layout.max_steps
    entry.columns = {
        name: {"dtype": column.dtype_name, "shape": list(column.shape)}
        for name, column in layout.schema.items()
    }


def _print(entries: list[_Entry]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NAME", "SIZE", "TRAJECTORIES", "STEPS", "COLUMNS", "AGE", "OWNER", "STATE"):
        right = title in ("SIZE", "TRAJECTORIES", "STEPS", "AGE")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for entry in entries:
        cells = (
            _shown(entry.name),
            _size(entry.bytes),
            _fraction(entry.trajectories, entry.max_trajectories),
            _fraction(entry.steps, entry.max_steps),
            _columns(entry.columns),
            _age(time.time() - datetime.datetime.fromisoformat(entry.created).timestamp()),
            entry.owner,
            _state(entry),
        )
        table.add_row(*(Text(cell) for cell in cells))
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)  # a line a table, for a file or a pipe
    console.print(table)
    for entry in entries:
        if entry.problem is not None:
            console.print(Text(f"{_shown(entry.name)}: {entry.problem}"), soft_wrap=True)


def _state(entry: _Entry) -> str:
    use = {True: "in use", False: "left over", None: "use unknown"}[entry.in_use]
    if entry.processes:
        use += f" by {', '.join(map(str, entry.processes))}"
    return f"unreadable, {use}" if entry.problem is not None else use


def _columns(columns: dict[str, dict[str, Any]] | None, most: int = 4) -> str:
    if columns is None:
        return "?"
    shown = [
        f"{name} {column['dtype']}{column['shape'] or ''}" for name, column in list(columns.items())[:most]
    ]
    more = [f"and {len(columns) - most} more"] if len(columns) > most else []
    return ", ".join(shown + more)


def _fraction(value: int | None, limit: int | None) -> str:
    return "?" if value is None else f"{value:,} of {limit:,}"


def _size(count: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} B"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# ---------------------------------------------------------------- rm


@app.command("rm")
def remove_tables(
    chosen: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Names as `gear-loader ls` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All tables that nobody uses.")] = False,
) -> None:
    """Remove tables that nobody uses. One in use is refused: the exit code is 1, and the processes are named."""
    if bool(chosen) == everything:
        raise typer.BadParameter("Give either the names of tables, or --all.")
    if everything:
        _remove_all()
    elif not _remove(list(dict.fromkeys(chosen or ()))):
        raise typer.Exit(1)


def _remove(chosen: list[str]) -> bool:
    """Remove those; whether that went well for all of them."""
    removed = True
    for name in chosen:
        try:
            count = names.remove(name, anything=True)
            typer.echo(f"Removed {name} ({_size(count)}).")
        except FileNotFoundError:
            here = [_shown(each) for each in _region_names()]
            typer.echo(
                f"There is no table named {name!r}; tables on this machine: {', '.join(here) or 'none'}.",
                err=True,
            )
            removed = False
        except OSError as error:
            typer.echo(str(error), err=True)
            removed = False
    return removed


def _remove_all() -> None:
    """Remove all that nobody uses; what has to stay is no failure."""
    found = _region_names()
    for name in found:
        try:
            count = names.remove(name, anything=False)
            typer.echo(f"Removed {name} ({_size(count)}).")
        except FileNotFoundError:  # somebody else has removed it
            continue
        except OSError as error:
            typer.echo(f"Left {_shown(name)}: {error}")
    if not found:
        typer.echo(f"No tables in {names.DIRECTORY}.")


def _region_names() -> list[str]:
    try:
        return names.region_names()
    except OSError as error:
        typer.echo(f"{names.DIRECTORY} cannot be read: {error}.", err=True)
        raise typer.Exit(1) from None


def _path(name: str) -> str:
    return os.path.join(names.DIRECTORY, names.PREFIX + name)


def _shown(name: str) -> str:
    """A name of whatever bytes on one line."""
    return name if name and name.isascii() and name.isprintable() else ascii(name)

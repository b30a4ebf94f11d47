"""The command line: tables in shared memory, serving them, compiling ahead, and diagnosis.

Listing and removing neither change a table nor wait for its lock. torch is loaded only to describe a table.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pwd
import shlex
import stat
import time
from typing import Annotated, Any

import typer

from gear_loader.errors import RegionError
from gear_loader.storage import shared_memory
from gear_loader.utils.formatting import printable, size

__all__ = ["app"]

_MOST_OF_A_NAME = 60  # characters of a column's name in the listing
_MOST_OF_A_PROBLEM = 500

app = typer.Typer(
    help="Gear Loader: tables in shared memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("gear-loader"))
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Gear Loader: tables in shared memory."""


# ---------------------------------------------------------------- ls


@dataclasses.dataclass
class _Entry:
    """One file of the listing. A field is None if it is unknown, because the file is not a readable table."""

    name: str
    path: str
    bytes: int
    created: str | None
    owner: str
    in_use: bool | None = None
    processes: list[int] = dataclasses.field(default_factory=list)
    problem: str | None = None
    trajectories: int | None = None
    steps: int | None = None
    max_trajectories: int | None = None
    max_steps: int | None = None
    columns: dict[str, dict[str, Any]] | None = None
    disk: dict[str, Any] | None = None


@app.command("ls")
def list_tables(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array with one object per table.")
    ] = False,
) -> None:
    """List the named tables of this machine, in use and left over."""
    entries = _entries()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2))
    elif not entries:
        typer.echo(f"No tables in {shared_memory.DIRECTORY}.")
    else:
        _print(entries)


def _entries() -> list[_Entry]:
    infos: dict[str, os.stat_result] = {}
    for name in _region_names():
        try:
            infos[name] = os.stat(_path(name), follow_symlinks=False)
        except FileNotFoundError:  # removed since the listing
            continue
    users = shared_memory.users({(info.st_dev, info.st_ino) for info in infos.values()})
    return [_entry(name, info, users[info.st_dev, info.st_ino]) for name, info in infos.items()]


def _entry(name: str, info: os.stat_result, pids: list[int]) -> _Entry:
    entry = _Entry(
        name=name,
        path=_path(name),
        bytes=info.st_size,
        created=_date(info.st_mtime),
        owner=_user(info.st_uid),
        in_use=True if pids else None,
        processes=pids,
    )
    if not stat.S_ISREG(info.st_mode):
        entry.problem = "It is not a regular file, and so not a table."
        return entry
    try:
        with shared_memory.opened(entry.path) as file:
            try:
                _describe(entry, file)
            except RegionError as error:
                entry.problem = str(error)
            if not pids:
                entry.in_use = not file.lock()
    except OSError as error:
        entry.problem = f"It cannot be read: {error}."
    return entry


def _describe(entry: _Entry, file: shared_memory.OpenFile) -> None:
    # Imported here because they load torch. A table is called damaged exactly if it cannot be attached.
    from gear_loader.storage.counters import NUM_READY, NUM_STEPS
    from gear_loader.storage.layout import read_counters
    from gear_loader.storage.tier_state import TierState

    layout, counters = read_counters(file.fd, file.info.st_size)
    tier = TierState.read(file.fd, layout, counters)
    if tier is not None:
        entry.disk = {**dataclasses.asdict(tier), "summary": str(tier)}
    entry.trajectories, entry.steps = counters[NUM_READY], counters[NUM_STEPS]
    entry.max_trajectories, entry.max_steps = layout.max_trajectories, layout.max_steps
    entry.columns = {
        name: {"dtype": dtype, "shape": shape} for name, dtype, shape, *_ in layout.schema.to_json()
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
            size(entry.bytes),
            _fraction(entry.trajectories, entry.max_trajectories),
            _fraction(entry.steps, entry.max_steps),
            _columns(entry.columns),
            _age(entry.created),
            entry.owner,
            _state(entry),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)  # one line for each table in a file or a pipe
    console.print(table)
    for entry in entries:
        if entry.disk is not None:
            line = f"{_shown(entry.name)}: {printable(entry.disk['summary'], _MOST_OF_A_PROBLEM)}"
            console.print(Text(line), soft_wrap=True)
        if entry.problem is not None:
            problem = printable(entry.problem, _MOST_OF_A_PROBLEM)
            console.print(Text(f"{_shown(entry.name)}: {problem}"), soft_wrap=True)


def _state(entry: _Entry) -> str:
    use = {True: "in use", False: "left over", None: "use unknown"}[entry.in_use]
    if entry.processes:
        use += f" by {', '.join(map(str, entry.processes))}"
    return f"unreadable, {use}" if entry.problem is not None else use


def _columns(columns: dict[str, dict[str, Any]] | None, most: int = 4) -> str:
    if columns is None:
        return "?"
    shown = [
        f"{printable(name, _MOST_OF_A_NAME)} {column['dtype']}{column['shape'] or ''}"
        for name, column in list(columns.items())[:most]
    ]
    more = [f"and {len(columns) - most} more"] if len(columns) > most else []
    return ", ".join(shown + more)


def _fraction(value: int | None, limit: int | None) -> str:
    return "?" if value is None else f"{value:,} of {limit:,}"


def _date(seconds: float) -> str | None:
    """A file's time in ISO 8601 format, or None if it is outside the range of the calendar."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return None


def _age(created: str | None) -> str:
    if created is None:
        return "?"
    seconds = time.time() - datetime.datetime.fromisoformat(created).timestamp()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# ---------------------------------------------------------------- top


@app.command("top")
def show_live(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE]...",
            help="Names as `gear-loader ls` shows them, or addresses gear://HOST:PORT/TABLE of servers; by default all "
            "tables of this machine.",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between displays.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="End after this number of displays.")] = None,
    secret_file: Annotated[
        str | None, typer.Option(help="The servers' secret; by default that of GEAR_LOADER_SECRET.")
    ] = None,
) -> None:
    """Watch tables: how full they are, what is added, drawn and evicted, who waits. Ctrl-C ends it.

    WAITING is how many writers and how many readers wait at the same time, on average. Tables of this machine are read
    without their lock, and without attaching to them.
    """
    from gear_loader.errors import GearError
    from gear_loader.top import Source, sources, watch

    try:
        fixed = sources(tables, _path, secret_file=secret_file) if tables else None
    except GearError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None

    def look() -> dict[str, Source]:
        return sources(_region_names(), _path, secret_file=None) if fixed is None else fixed

    watch(look, interval=interval, count=count)


# ---------------------------------------------------------------- look, convert


@app.command("look")
def look_at(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TABLE|DIRECTORY|ADDRESS",
            help="A table of this machine, the directory of a checkpoint, or what gear_loader.load_dataset takes.",
        ),
    ],
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with pictures of some episodes, too.")
    ] = None,
    episode: Annotated[
        list[int] | None, typer.Option(help="Number of an episode of the page; may be given several times.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Otherwise, so many episodes, evenly spaced.")] = 4,
    most: Annotated[int, typer.Option(min=1, help="Most episodes of a data set that are loaded.")] = 1000,
) -> None:
    """Show what is in a table or data set: episodes, lengths, columns, ranges, frames and curves."""
    # Imported here because they load torch.
    from pathlib import Path

    from gear_loader.errors import GearError, SchemaError
    from gear_loader.look.summary import episode_numbers, opened, print_summary, summarise
    from gear_loader.utils.paths import local_path

    try:
        path = None if html is None else Path(local_path(html, SchemaError, "--html"))
        with opened(source, most) as table:
            found = summarise(table, source)
            chosen = episode_numbers(len(found.lengths), episode or (), episodes)
            print_summary(found)
            if path is not None:
                from gear_loader.look.page import page

                path.write_text(page(table, found, chosen), "utf-8")
                typer.echo(f"Written: {path}")
    except (GearError, OSError, ImportError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@app.command("convert")
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM", help="As for `look`: a table, a directory of a checkpoint, or a data set."
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TO",
            help="As gear_loader.Table.export takes it: parquet:PATH, hf:, npz: or lerobot:FOLDER, minari:ID.",
        ),
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=COLUMN]", help="A column, or its name there and here; by default all."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="An option of the format, such as fps=30 of LeRobot: text, or JSON."
        ),
    ] = None,
) -> None:
    """Write a table or data set as a data set of another format."""
    from gear_loader.errors import GearError
    from gear_loader.look.summary import opened

    columns = {name: here or name for name, _, here in (each.partition("=") for each in column or ())}
    options = {
        name: _json_or_text(value) for name, _, value in (each.partition("=") for each in option or ())
    }
    if "columns" in options or not all(name.isidentifier() for name in options):
        raise typer.BadParameter(f"--option {option} was given; expected NAME=VALUE, such as fps=30.")
    try:
        with opened(source, None) as table:
            table.export(target, columns=columns or None, **options)
            typer.echo(f"Written: {target} ({len(table):,} episodes, {table.num_steps:,} steps)")
    except (GearError, OSError, ImportError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


# ---------------------------------------------------------------- rm


@app.command("rm")
def remove_tables(
    chosen: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Names as `gear-loader ls` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All tables that are not in use.")] = False,
) -> None:
    """Remove tables that are not in use. For a table in use the exit code is 1, and its processes are listed."""
    if bool(chosen) == everything:
        raise typer.BadParameter("Give either the names of tables, or --all.")
    if everything:
        _remove_all()
    elif not _remove(list(dict.fromkeys(chosen or ()))):
        raise typer.Exit(1)


def _remove(chosen: list[str]) -> bool:
    """Remove tables by name; returns whether all were removed."""
    removed = True
    for name in chosen:
        try:
            count = shared_memory.remove(name, anything=True)
            typer.echo(f"Removed {name} ({size(count)}).")
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
    """Remove all tables that are not in use. A table in use is not a failure."""
    found = _region_names()
    for name in found:
        try:
            count = shared_memory.remove(name, anything=False)
            typer.echo(f"Removed {name} ({size(count)}).")
        except FileNotFoundError:  # removed by another process
            continue
        except OSError as error:
            typer.echo(f"Left {_shown(name)}: {error}")
    if not found:
        typer.echo(f"No tables in {shared_memory.DIRECTORY}.")


def _region_names() -> list[str]:
    try:
        return shared_memory.region_names()
    except OSError as error:
        typer.echo(f"{shared_memory.DIRECTORY} cannot be read: {error}.", err=True)
        raise typer.Exit(1) from None


def _path(name: str) -> str:
    return os.path.join(shared_memory.DIRECTORY, shared_memory.PREFIX + name)


def _shown(name: str) -> str:
    """A table's name on one line, escaped if necessary."""
    return name if name and name.isascii() and name.isprintable() else ascii(name)


# ---------------------------------------------------------------- serve


@app.command("serve")
def serve_tables(
    tables: Annotated[list[str], typer.Argument(metavar="NAME...", help="Tables of this machine.")],
    transports: Annotated[
        list[str] | None,
        typer.Option("--transport", help="socket or ucx; may be given twice. By default socket."),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen at; port 0 chooses a free one.")
    ] = "127.0.0.1:0",
    secret_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The secret that clients must know, at least 16 bytes that only you may read. "
            "By default that of GEAR_LOADER_SECRET.",
        ),
    ] = None,
    one_sided: Annotated[
        bool,
        typer.Option(
            "--one-sided", help="Allow one-sided NIXL reads of the tables' memory: closed networks only."
        ),
    ] = False,
    allow: Annotated[
        str,
        typer.Option(
            metavar="all|read|write", help="What clients may do: read rows, add trajectories, or all."
        ),
    ] = "all",
    tls_cert: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Encrypt all connections: certificate of the server, PEM."),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Private key of that certificate, PEM.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve statistics for Prometheus at http://HOST:PORT/metrics, unencrypted and to everyone who can "
            "reach it; the host is 127.0.0.1 by default.",
        ),
    ] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve tables to other machines, which add trajectories and read rows. Prints its addresses as one JSON line."""
    # Imported here because they load torch.
    from gear_loader.errors import GearError
    from gear_loader.transport.access import check_allow
    from gear_loader.transport.handshake import check_secret, read_secret
    from gear_loader.transport.process import read_parent, run_server

    host, port = _address("--listen", listen)
    page = (
        None
        if metrics is None
        else _address("--metrics", metrics if ":" in metrics else f"127.0.0.1:{metrics}")
    )
    chosen = list(dict.fromkeys(transports or ["socket"]))
    if port and len(chosen) > 1:
        raise typer.BadParameter(
            "Several transports cannot listen at one port: give port 0, or one transport."
        )
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("One of --tls-cert and --tls-key was given; expected both.")
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    try:
        if parent is not None:
            secret = check_secret(read_parent(parent))
        else:
            secret = _secret_of_environment() if secret_file is None else read_secret(secret_file)
        listens = [(name, host, port) for name in chosen]
        options: dict[str, Any] = {"one_sided": one_sided, "allow": check_allow(allow), "tls": tls}
        run_server(tables, listens, secret, parent=parent, metrics=page, **options)
    except (GearError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _address(option: str, text: str) -> tuple[str, int]:
    """Host and port."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or not host.strip("[]"):
        raise typer.BadParameter(f"{option} {text} was received; expected HOST:PORT, such as 127.0.0.1:5555.")
    return host.strip("[]"), int(port)


def _secret_of_environment() -> bytes:
    """The secret in the environment, for a server started by hand without a secret file."""
    from gear_loader.transport.handshake import check_secret

    secret = os.environb.get(b"GEAR_LOADER_SECRET", b"").strip()
    if not secret:
        raise typer.BadParameter(
            "GEAR_LOADER_SECRET holds no secret; give --secret-file a file with one, such as `openssl rand -hex 32` "
            "prints, and the same to all nodes."
        )
    return check_secret(secret)


# ---------------------------------------------------------------- ucx-env


@app.command("ucx-env")
def print_environment_for_ucx(
    folder: Annotated[
        str | None,
        typer.Argument(
            help="Where links to the libraries are made. By default gear-loader/ucx in $XDG_CACHE_HOME or ~/.cache."
        ),
    ] = None,
) -> None:
    """Let ucxx use NIXL's UCX, which has InfiniBand: eval "$(gear-loader ucx-env)" before training starts."""
    from pathlib import Path

    from gear_loader.errors import TransportError
    from gear_loader.transport import ucx_links
    from gear_loader.utils.paths import local_path

    try:
        place = Path(local_path(folder, TransportError)).absolute() if folder else ucx_links.links_folder()
        variables = ucx_links.link_ucx(place)
    except (TransportError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


# ---------------------------------------------------------------- warmup


@app.command("warmup")
def warm_up_loops() -> None:
    """Compile the loops for this machine, which their first use would do otherwise; also those that queue for a GPU."""
    # Imported here because it loads torch.
    import logging

    from gear_loader import warmup

    start, logger = time.perf_counter(), logging.getLogger("gear_loader")
    before = logger.level
    logger.setLevel(logging.ERROR)  # without the notice about what this does
    try:
        compiled = warmup.warm_up(lambda stage: typer.echo(f"{stage} ...", err=True))
    finally:
        logger.setLevel(before)
    seconds = time.perf_counter() - start
    if compiled:
        typer.echo(f"Compiled {len(compiled)} loops in {seconds:.1f} s.")
    else:
        typer.echo(f"All loops were compiled already; tried in {seconds:.1f} s.")


# ---------------------------------------------------------------- doctor


@app.command("doctor")
def diagnose(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the transports of this machine, whether InfiniBand is possible, and every slow path with its remedy."""
    from gear_loader.doctor import report

    found = report()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print_report(found)


def _print_report(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    carriers = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("TRANSPORT", "VERSION", "DEVICES", "INFINIBAND", "STATE"):
        carriers.add_column(title, overflow="fold")
    for name, carrier in found["carriers"].items():
        inside = f" (UCX {carrier['ucx']})" if carrier.get("ucx") else ""
        cells = (
            name,
            f"{carrier['version'] or '-'}{inside}",
            ", ".join(f"{device} ({kind})" for device, kind in carrier["devices"]) or "-",
            "possible" if carrier["infiniband"]["possible"] else "no",
            carrier["problem"] or "works",
        )
        carriers.add_row(*(Text(cell) for cell in cells))
    console.print(carriers)
    for line in _findings(found):
        console.print(Text(line), soft_wrap=True)
    for slow in found["slow"]:
        console.print(Text(f"Slow: {slow['what']}, because {slow['why']}."), style="yellow", soft_wrap=True)
        console.print(Text(f"  What to do: {slow['remedy']}."), soft_wrap=True)


def _findings(found: dict[str, Any]) -> list[str]:
    """The other lines of the report."""
    memory, cuda, adapters = found["memory"], found["cuda"], found["infiniband"]["adapters"]
    limit = memory["locked_limit"]
    pinning = {True: ", memory can be pinned", False: ", memory cannot be pinned", None: ""}[
        cuda.get("pinning")
    ]
    lines = [
        f"Machine: {found['machine']['cores']} cores, Python {found['machine']['python']}, "
        f"{found['machine']['system']}",
        f"InfiniBand adapters: {', '.join(adapters) or 'none'}",
        f"Memory that may be locked: {'all' if limit is None else size(limit)}; {shared_memory.DIRECTORY}: "
        f"{size(memory['shm_free'])} of {size(memory['shm_bytes'])} free",
        f"Huge pages: private tables {'yes' if memory['huge_private'] else 'no'}, named ones "
        f"{'yes' if memory['huge_named'] else 'no'} (huge={memory['huge_mount']}); "
        f"NUMA nodes: {memory['nodes'] or [0]}, of GPUs {memory['gpu_nodes'] or 'unknown'}, "
        f"of tables (sampled pages) {memory['table_nodes'] or 'none'}",
        f"CUDA: {', '.join(cuda.get('devices') or ()) or 'no device'}{pinning}; torch {cuda.get('torch', 'unknown')}",
        f"Triton: {found['triton'].get('version') or found['triton']['problem']}; "
        f"numba: {found['numba'].get('version') or found['numba']['problem']}",
    ]
    lines += [f"Disk of table {name}: {tier}" for name, tier in memory["disks"].items()]
    return lines + [f"Set: {key}={value}" for key, value in found["environment"].items()]

"""The options that experiments share, and the session that they open with them."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import machine
from benchmarks.harness import RESULTS, Deadline, Incorrect, Session
from benchmarks.peers.process import PeerFailed

__all__ = ["Device", "Minutes", "Out", "Peers", "Quick", "Repeats", "Threads", "numbers", "opened", "some_of"]


class Device(str, enum.Enum):
    """Where batches are wanted."""

    cpu = "cpu"
    cuda = "cuda"


Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, to see that it works; not for figures.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Turns that each variant gets.")]
Out = Annotated[Path | None, typer.Option(help="File to append JSON lines to.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads on the CPU: 2 by default.")]
Minutes = Annotated[float | None, typer.Option(help="Start no new comparison after so many.")]
Peers = Annotated[
    list[Path] | None,
    typer.Option(
        help="A folder of environments with other libraries (benchmarks/peers/make.sh; .peers by default), or the "
        "Python of one; may be repeated."
    ),
]


@contextlib.contextmanager
def opened(
    experiment: str,
    *,
    quick: bool,
    repeats: int,
    out: Path | None,
    threads: int | None,
    minutes: float | None,
    device: Device = Device.cpu,
    configuration: Mapping[str, Any] | None = None,
    pause: float = 0.002,
) -> Iterator[Session]:
    """A session of an experiment: the machine is shown first; errors of a run end the program with status 1.

    Args:
        experiment: its name, and that of its file in `benchmarks/results/` if `out` is None.
        threads: of torch in this process, from here on; None for at most 2 on the CPU and all with CUDA.
        configuration: further options, for the rows.
        pause: see `Session`; with CUDA there is none.
    """
    started = time.monotonic()
    cuda = device is Device.cuda
    if cuda and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here; use --device cpu.", param_hint="--device")
    threads = threads or (machine.cores() if cuda else min(2, machine.cores()))
    torch.set_num_threads(threads)
    session = Session(
        out or RESULTS / ("quick.jsonl" if quick else f"{experiment}.jsonl"),
        experiment=experiment,
        configuration={"quick": quick, "threads": threads, **(configuration or {})},
        device=torch.cuda.get_device_name() if cuda else "cpu",
        repeats=repeats,
        deadline=Deadline(minutes),
        pause=0.0 if cuda else pause,
    )
    session.show_machine()
    try:
        yield session
    except (Incorrect, PeerFailed) as error:
        what = "wrong result, not timed" if isinstance(error, Incorrect) else "failed"
        session.console.print(f"{what}: {error}", style="bold red", highlight=False, markup=False)
        raise typer.Exit(1) from error
    session.console.print(f"{time.monotonic() - started:.0f} s", style="dim", highlight=False)


def numbers(text: str | None, option: str, least: int, most: int) -> tuple[int, ...]:
    """The numbers of an option such as ``1e4,1e6``, sorted; none of None.

    Raises:
        typer.BadParameter: they are not, or not within the bounds.
    """
    if text is None:
        return ()
    try:
        found = tuple(int(float(part)) for part in text.split(","))
    except (ValueError, OverflowError):
        found = (least - 1,)
    if min(found) < least or max(found) > most:
        raise typer.BadParameter(f"{text!r}; expected numbers from {least:,} to {most:,}.", param_hint=option)
    return tuple(sorted(set(found)))


def some_of(text: str, known: Sequence[str], option: str) -> list[str]:
    """The names of an option such as ``collect,select``, in the order of `known`.

    Raises:
        typer.BadParameter: one is not known.
    """
    chosen = text.split(",")
    if not set(chosen) <= set(known):
        raise typer.BadParameter(f"{text!r}; expected some of {','.join(known)}.", param_hint=option)
    return [name for name in known if name in chosen]

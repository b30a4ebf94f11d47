"""The options that experiments share, and how a command is made of an experiment."""

from __future__ import annotations

import enum
import inspect
import time
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import machine
from benchmarks.experiments import named
from benchmarks.harness import RESULTS, Incorrect, Session
from benchmarks.peers.process import PeerFailed, environments


class Device(str, enum.Enum):
    """Where batches are wanted."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def described(text: str, **limits: Any) -> Any:
    """What `Annotated` has of an option. limits: `min`, `exists` and others of typer."""
    return typer.Option(help=text, **limits)


def option(kind: Any, text: str, **limits: Any) -> Any:
    """The annotation of an option that need not be given, where it has a name of its own."""
    return Annotated[kind | None, described(text, **limits)]


SHARED: dict[str, Any] = {
    "device": option(Device, "Where batches are wanted: cpu by default; auto: a GPU if there is one."),
    "quick": Annotated[
        bool, typer.Option("--quick", help="Small sizes, to see that it works; not for figures.")
    ],
    "peers": option(
        Path, "Folder of environments with other libraries (benchmarks/peers/make.sh); .peers by default."
    ),
    "repeats": option(int, "Turns that each variant gets.", min=1),
    "out": option(Path, "File to append JSON lines to."),
    "threads": option(int, "Threads on the CPU: 2 by default, all with cuda.", min=1),
    "minutes": option(float, "Start no new comparison after so many."),
}
"""Option -> its type; those that an experiment has no use for are left away."""


def signature(own: Iterable[inspect.Parameter], names: Iterable[str]) -> inspect.Signature:
    """Of a command with parameters of its own, and these of the shared options, none of which has to be given."""
    keyword, default = inspect.Parameter.KEYWORD_ONLY, {"quick": False}
    shared = [
        inspect.Parameter(name, keyword, default=default.get(name), annotation=SHARED[name]) for name in names
    ]
    return inspect.Signature([*own, *shared])


def experiment(
    name: str,
    *,
    repeats: tuple[int, ...],
    pause: float = 0.002,
    threads: int | None = None,
    device: Device = Device.cpu,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make an experiment's command of a function ``work(session, *, options of its own)``.

    The command opens the session, shows the machine, does the work and shows what there is to say at the end; errors of
    a run end the program with status 1. repeats: with ``--quick``, usually, and with CUDA if that differs. pause: see
    `Session`; with CUDA there is none. threads: of torch, if they are not for the user to choose. device: the default.
    """
    about = named(name)
    useful = {"device": "cuda" in about.devices, "peers": bool(about.peers), "threads": threads is None}

    def made(work: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            shared = {option: given.pop(option, None) for option in SHARED}
            shared |= {"threads": threads or shared["threads"], "device": shared["device"] or device}
            started = time.monotonic()
            session = _session(name, shared, repeats, pause)
            session.show_machine()
            try:
                work(session, **given)
                session.finish()
            except (Incorrect, PeerFailed) as error:
                what = "wrong result, not timed" if isinstance(error, Incorrect) else "failed"
                session.console.print(f"{what}: {error}", style="bold red", highlight=False, markup=False)
                raise typer.Exit(1) from error
            session.console.print(f"{time.monotonic() - started:.0f} s", style="dim", highlight=False)

        hints = typing.get_type_hints(work, include_extras=True)
        own = [
            option.replace(annotation=hints[option.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for option in list(inspect.signature(work).parameters.values())[1:]
        ]
        whole = signature(own, [option for option in SHARED if useful.get(option, True)])
        run.__signature__ = whole  # type: ignore[attr-defined]
        # Not `name`, which `run` uses: Python 3.12 would take it for the comprehension's.
        run.__annotations__ = {key: option.annotation for key, option in whole.parameters.items()}
        run.__doc__, run.__module__ = work.__doc__, work.__module__
        return run

    return made


def _session(name: str, shared: dict[str, Any], repeats: tuple[int, ...], pause: float) -> Session:
    wanted, quick = shared["device"], bool(shared["quick"])
    cuda = wanted is Device.cuda or (wanted is Device.auto and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here; use --device cpu.", param_hint="--device")
    threads = shared["threads"] or (machine.cores() if cuda else min(2, machine.cores()))
    torch.set_num_threads(threads)
    return Session(
        shared["out"] or RESULTS / ("quick.jsonl" if quick else f"{name}.jsonl"),
        experiment=name,
        configuration={"quick": quick, "threads": threads},
        device=torch.cuda.get_device_name() if cuda else "cpu",
        repeats=shared["repeats"] or (repeats[0] if quick else repeats[-1] if cuda else repeats[1]),
        minutes=shared["minutes"],
        pause=0.0 if cuda else pause,
        quick=quick,
        threads=threads,
        peers=environments(shared["peers"]),
    )


Folder = Annotated[
    Path | None,
    described("On the disk to measure; the system's temporary one by default.", exists=True, file_okay=False),
]
"""Where an experiment writes what it measures."""


def numbers(
    text: str | None, option: str, least: int, most: int, kind: Callable[[float], Any] = int
) -> tuple[Any, ...]:
    """The numbers of an option such as ``1e4,1e6``, sorted; none of None."""
    if text is None:
        return ()
    try:
        found = tuple(kind(float(part)) for part in text.split(","))
    except (ValueError, OverflowError):
        found = (float("nan"),)
    if not all(least <= number <= most for number in found):
        raise typer.BadParameter(f"{text!r}; expected numbers from {least:,} to {most:,}.", param_hint=option)
    return tuple(sorted(set(found)))


def some_of(text: str, known: Sequence[str], option: str) -> list[str]:
    """The names of an option such as ``collect,select``, in the order of `known`."""
    chosen = text.split(",")
    if not set(chosen) <= set(known):
        raise typer.BadParameter(f"{text!r}; expected some of {','.join(known)}.", param_hint=option)
    return [name for name in known if name in chosen]

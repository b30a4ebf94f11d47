"""``python -m benchmarks transitions``: single transitions, as DQN and SAC replay them.

From a million steps of CartPole's size, in episodes of 9 to 500 steps, batches of 256 are drawn uniformly; or by
priority, and then the steps drawn get new priorities. To the same store, which is full, steps of one environment are
appended, and of 8, 64 and 4,096 side by side. Ours is what docs/dqn.md does: a table of episodes, and
`ReplayDataset` with ``unit="step"``. `ours, SB3's calls` is our replay buffer for Stable-Baselines3, beside its own.

The yardstick is plain torch: a tensor for each column, `index_select`, `torch.multinomial`. Every way is in a process
of its own, which also checks it: transitions drawn are compared with those stored, draws with priorities by frequency,
before and after some are set, and what was appended is drawn completely. Stable-Baselines3 has no buffer that draws by
priority. Reverb is left out: its items are drawn one by one, through a server.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from benchmarks.harness import Incorrect, Session, Variant
from benchmarks.options import experiment, numbers, some_of
from benchmarks.peers.catalog import library_of, peers_of
from benchmarks.peers.process import PeerFailed, PeerProcess, start
from benchmarks.peers.select import ALPHA, BETA
from benchmarks.peers.transitions import ENVS, MODES, PRIORITIZED, UNIFORM

SEED = 3
YARDSTICK = "plain torch"
OWN = {
    YARDSTICK: "plain_transitions",
    **dict.fromkeys(
        ("ours", "ours, copy=False", "ours, ReplayBuffer", "ours, every step", "ours, per episode"),
        "gear_transitions",
    ),
}
"""Way -> module of `benchmarks.peers`, of those that this interpreter has."""
FOR_SB3 = "ours, SB3's calls"
OTHERS = tuple(peers_of("transitions"))
LABELS = {
    UNIFORM: "uniform: sample",
    PRIORITIZED: "by priority: sample, update_priority",
    **{mode: f"append, {n:,} environment{'s' if n > 1 else ''}" for mode, n in ENVS.items()},
}


@experiment("transitions", repeats=(2, 15), pause=0.005)
def command(
    session: Session,
    steps: Annotated[str | None, typer.Option(help="Steps stored: 1e6 by default.")] = None,
    modes: Annotated[str | None, typer.Option(help=f"Some of {','.join(MODES)}; all by default.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Transitions of a batch.")] = 256,
) -> None:
    """Single transitions: drawing, setting priorities, appending, beside other replay libraries."""
    (count,) = numbers(steps, "--steps", 20_000, 10**7) or ((20_000,) if session.quick else (10**6,))
    chosen = some_of(modes, MODES, "--modes") if modes else MODES
    session.configure(steps=count, batch=batch, modes=chosen, seed=SEED, alpha=ALPHA, beta=BETA)
    ways = {name: functools.partial(_started, session, name) for name in (*OWN, FOR_SB3, *OTHERS)}
    with session.processes(ways, required=OWN) as processes, session.progress("transitions", len(chosen)):
        for mode in chosen:
            if not session.late(LABELS[mode]):
                measured(session, processes, mode, {"steps": count, "seed": SEED}, batch)


def _started(session: Session, name: str) -> PeerProcess:
    if name == FOR_SB3:
        return start(session.peers, "transitions", "gear_sb3", name, session.threads, environment="sb3")
    library = OWN.get(name) or library_of("transitions", name)
    return start(session.peers, "transitions", library, name, session.threads)


def measured(
    session: Session, processes: dict[str, PeerProcess], mode: str, spec: dict[str, Any], batch: int
) -> None:
    """Build and check all ways, two at a time, then measure them in turn."""
    label = LABELS[mode]
    told = {"steps": spec["steps"], **({"batch": batch} if mode in (UNIFORM, PRIORITIZED) else {})}
    with ThreadPoolExecutor(2) as pool:
        built = {
            name: pool.submit(process.ask, "build", spec=spec, mode=mode, batch=batch)
            for name, process in processes.items()
        }
    variants = []
    for name, answer in built.items():
        if isinstance(answer.exception(), PeerFailed) and str(answer.exception()).endswith(_NO_CALL):
            if name in OTHERS:
                session.leave(f"{name}, {label}", "it has no such buffer")
            continue
        required = name in OWN
        what = f"{name}, {label}"
        found = session.attempt(what, functools.partial(_built, answer), required=required)
        if found is not None:
            make = functools.partial(_variant, session, name, processes[name], mode, batch, found["setting"])
            variants.append(session.attempt(what, make, required=required))
    variants = [variant for variant in variants if variant is not None]
    others = [variant.name for variant in variants if variant.name in OTHERS]
    session.compare(mode, label, variants, YARDSTICK, told, others, unit="rows")


_NO_CALL = "it has no call for that"


def _built(answer: Any) -> dict[str, Any]:
    try:
        return dict(answer.result())
    except PeerFailed as error:
        raise Incorrect(str(error)) from error


def _variant(
    session: Session,
    name: str,
    process: PeerProcess,
    mode: str,
    batch: int,
    setting: dict[str, Any],
) -> Variant:
    def timed(count: int) -> float:
        return float(process.ask("measure", count=count)["seconds"])

    short = 0.005 if session.quick else 0.05
    count = 16
    while (seconds := min(timed(count) for _ in range(2))) < short / 4 and count < 1 << 16:
        count *= 2
    count = max(4, round(count * short / seconds))
    rows = ENVS.get(mode, batch)
    about = {} if name in OWN else {"peer": process.about}
    targets = dict.fromkeys(OTHERS, 1.0) if name.startswith("ours") else {}
    parameters = {**setting, **about}
    return Variant(
        name, lambda: timed(count), lambda: None, rows, count, parameters, targets, required=name in OWN
    )

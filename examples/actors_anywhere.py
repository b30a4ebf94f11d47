"""Actor processes on another machine collect CartPole episodes into a table of this one, which a trainer learns from.

Run: pip install '.[sources]' (in a clone of Gear Loader), then python examples/actors_anywhere.py

Server and actors run in two network namespaces, joined by a virtual cable, if this is run by root; otherwise all is on
loopback. Actors know an address and a secret, and load neither torch nor CUDA. On the way an actor is killed, and
the link is cut for some seconds (on loopback the server is stopped instead). In the end every episode is there once, as
it was played.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import gear_loader as gear

try:
    import gymnasium
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[sources]', in a clone of Gear Loader.")

CUT = 3.0  # seconds
PAUSE = 0.01  # seconds of an actor between two episodes, so that the cuts find it at work


# ---------------------------------------------------------------- actors


def play(env: Any, actor: int, number: int) -> Iterator[dict[str, Any]]:
    """The steps of an episode, and last its final observation: the same each time."""
    random = np.random.default_rng((actor, number))
    observation, _ = env.reset(seed=int(random.integers(2**31)))
    ended = False
    while not ended:
        action = int(random.integers(2))
        yield {"observation": observation, "action": action}
        observation, _, terminated, truncated, _ = env.step(action)
        ended = terminated or truncated
    yield {"observation": observation}


def act(url: str, actor: int, first: int, episodes: int) -> None:
    """What an actor does: play the episodes `first` to `episodes` and send them."""
    env = gymnasium.make("CartPole-v1")
    with gear.connect(url) as table:  # the secret is in the environment
        writer = table.writer()
        for number in range(first, episodes):
            *steps, final = play(env, actor, number)
            for step in steps:
                writer.append(step)
            writer.commit(final=final, trajectory={"actor": actor, "number": number})
            time.sleep(PAUSE)
    if "torch" in sys.modules:
        sys.exit("The actor has loaded torch, which it does not need.")


# ---------------------------------------------------------------- two machines


class Machines(NamedTuple):
    """Words before commands of the server and of actors, the server's address, what it all is, and how to cut it."""

    server: list[str]
    actors: list[str]
    host: str
    what: str
    link: Callable[[str], None] | None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@contextlib.contextmanager
def machines() -> Iterator[Machines]:
    """Two network namespaces if they can be made, otherwise this machine. The addresses are those for documentation."""
    one, two = (f"actors-{os.getpid()}-{side}" for side in "ab")
    try:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise OSError("root and the command ip are needed")
        for name in (one, two):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", one, "link", "add", "v0", "type", "veth", "peer", "name", "w0", "netns", two)
        for name, device, address in ((one, "v0", "192.0.2.1/24"), (two, "w0", "192.0.2.2/24")):
            ip("-n", name, "addr", "add", address, "dev", device)
            ip("-n", name, "link", "set", device, "up")
        inside = [["ip", "netns", "exec", name] for name in (one, two)]
        found = Machines(
            *inside,
            "192.0.2.1",
            "two network namespaces",
            lambda state: ip("-n", two, "link", "set", "w0", state),
        )
    except (OSError, subprocess.SubprocessError) as error:
        found = Machines([], [], "127.0.0.1", f"one, since network namespaces cannot be made ({error})", None)
    try:
        yield found
    finally:
        for name in (one, two) if shutil.which("ip") is not None else ():
            with contextlib.suppress(subprocess.SubprocessError):
                ip("netns", "del", name)


class Server:
    """``gear-loader serve`` of a table, which is started again at the same port."""

    def __init__(self, machines: Machines, table: str) -> None:
        self.secret = secrets.token_hex(16)
        self.machines, self.table, self.port = machines, table, 0
        self.start()

    def start(self) -> None:
        words = ["serve", self.table, "--listen", f"{self.machines.host}:{self.port}", "--allow", "write"]
        self.process = subprocess.Popen(
            [*self.machines.server, sys.executable, "-m", "gear_loader", *words],
            env={**os.environ, "GEAR_LOADER_SECRET": self.secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        address = json.loads(self.process.stdout.readline())["addresses"]["socket"]
        self.port = int(address.rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"gear://{self.machines.host}:{self.port}/{self.table}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def cut(self) -> None:
        """Cut the link for some seconds; without one, stop the server."""
        if self.machines.link is not None:
            self.machines.link("down")
            time.sleep(CUT)
            self.machines.link("up")
        else:
            self.stop()
            time.sleep(CUT)
            self.start()

    def actor(self, actor: int, first: int, episodes: int) -> subprocess.Popen[bytes]:
        """Start an actor on the other machine, which plays the episodes from `first` on."""
        words = [sys.executable, __file__, "--actor", actor, "--first", first, "--episodes", episodes]
        return subprocess.Popen(
            [*self.machines.actors, *map(str, words), "--url", self.url],
            env={**os.environ, "GEAR_LOADER_SECRET": self.secret},
        )


# ---------------------------------------------------------------- the trainer


class Trainer:
    """A network that learns to predict the next observation from batches of the table."""

    def __init__(self, table: gear.Table) -> None:
        import torch

        self.torch = torch
        now, following = gear.Window(1, squeeze=True), gear.Window(1, 1, column="observation", squeeze=True)
        self.dataset = gear.ReplayDataset(
            table,
            batch_size=64,
            windows={"observation": now, "action": now, "following": following},
            sampler=gear.Uniform(unit="step"),
            batches_per_epoch=1_000_000,
            device="cpu",
        )
        self.network = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=3e-3)

    def losses(self) -> Iterator[float]:
        """The loss of one batch after another."""
        for batch in self.dataset:
            given = self.torch.cat([batch["observation"], batch["action"].float()[:, None]], 1)
            wanted = batch["following"] - batch["observation"]
            loss = (self.network(given) - wanted).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            yield loss.item()


def table_of(episodes: int) -> gear.Table:
    import torch

    columns = {
        "observation": gear.Column(torch.float32, (4,), final=True),
        "action": gear.Column(torch.int64),
        "actor": gear.Column(torch.int64, per="trajectory"),
        "number": gear.Column(torch.int64, per="trajectory"),
    }
    name = f"actors-anywhere-{os.getpid()}"
    return gear.Table.create(columns, max_steps=100 * episodes, max_trajectories=episodes, name=name)


def all_ended(running: list[subprocess.Popen[bytes]]) -> bool:
    """Whether all actors have done their work."""
    codes = [process.poll() for process in running]
    if any(codes):
        sys.exit(f"The actors have ended with {codes}.")
    return None not in codes


def learn(
    table: gear.Table, server: Server, actors: int, episodes: int, stack: contextlib.ExitStack
) -> list[float]:
    """Train until all actors have ended; kill one and cut the link on the way. Returns the losses."""
    running = [server.actor(actor, 0, episodes) for actor in range(actors)]
    stack.callback(lambda: [process.kill() for process in running])
    while len(table) < min(64, actors * episodes) and not all_ended(running):
        time.sleep(0.05)
    losses: list[float] = []
    killed, cutting = False, threading.Thread(target=server.cut)
    for loss in Trainer(table).losses():
        losses.append(loss)
        share = len(table) / (actors * episodes)
        if not killed and share > 0.25:
            killed = True
            print("An actor is killed, and another takes its place ...", flush=True)
            running[0].send_signal(signal.SIGKILL)
            running[0].wait()
            time.sleep(1.0)  # the server stores what it has received of it
            there = sum(int(table[int(index)]["actor"]) == 0 for index in table.indices())
            running[0] = server.actor(0, there, episodes)
        if cutting.ident is None and share > 0.5:
            print(f"The link is cut for {CUT:g} s ...", flush=True)
            cutting.start()
        if all_ended(running):
            break
    cutting.join()
    return losses


def check(table: gear.Table, actors: int, episodes: int) -> None:
    """Every episode is there once, as it was played."""
    env = gymnasium.make("CartPole-v1")
    found = set()
    for index in table.indices():
        row = table[int(index)]
        key = int(row["actor"]), int(row["number"])
        *steps, _ = play(env, *key)
        if key in found or row["observation"].tolist() != [step["observation"].tolist() for step in steps]:
            sys.exit(f"Episode {key[1]} of actor {key[0]} is there twice, or not as it was played.")
        found.add(key)
    if len(found) != actors * episodes:
        sys.exit(f"{len(found)} episodes are there; expected {actors * episodes}.")
    print(f"Every episode is there once, as it was played: {len(found)} of {actors} actors.")


def main() -> None:
    options = argparse.ArgumentParser(
        description="Actors of another machine write; one and the link are cut."
    )
    options.add_argument("--actors", type=int, default=3)
    options.add_argument("--episodes", type=int, default=600, help="of each actor")
    options.add_argument("--actor", type=int, help=argparse.SUPPRESS)
    options.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options.add_argument("--url", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.actor is not None:
        act(args.url, args.actor, args.first, args.episodes)
        return

    with table_of(args.actors * args.episodes) as table, machines() as found, contextlib.ExitStack() as stack:
        stack.callback(table.unlink)
        print(f"Machines: {found.what}.", flush=True)
        server = Server(found, str(table.name))
        stack.callback(server.stop)
        losses = learn(table, server, args.actors, args.episodes, stack)
        print(
            f"{len(losses)} batches: loss {losses[0]:.5f} at first, {np.mean(losses[-50:]):.5f} in the end."
        )
        check(table, args.actors, args.episodes)


if __name__ == "__main__":
    main()

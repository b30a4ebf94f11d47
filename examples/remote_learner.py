"""A learner in a process of its own draws from a table that a server offers; server and learner are killed on the way.

Run: python examples/remote_learner.py

The table holds steps of a noisy linear system. The learner knows an address and a secret, draws by priority, sends the
errors of its model back as priorities, and saves its state. In the middle of a batch stream the server is killed and
started again; later the learner is killed, and another one goes on with its state. Its batches are those of a learner
that nothing happened to, bit for bit, and the model is learnt.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch

import gear_loader as gear

NAME = f"remote-learner-{os.getpid()}"
TRUTH = torch.tensor([[0.5, -1.0, 2.0, 0.25]])
SAVE = 10  # batches between two states


def filled() -> gear.Table:
    """A table of 400 trajectories of the system."""
    columns = {"x": gear.Column(torch.float32, (4,)), "y": gear.Column(torch.float32)}
    table = gear.Table.create(columns, max_steps=40_000, max_trajectories=400, name=NAME, if_exists="replace")
    random = torch.Generator().manual_seed(0)
    for number in range(400):
        x = torch.randn(20 + number % 60, 4, generator=random)
        noise = 0.1 * torch.randn(len(x), generator=random)
        table.add({"x": x, "y": (x * TRUTH).sum(1) + noise}, priority=1.0)
    return table


def dataset(table: Any, batches: int) -> gear.ReplayDataset:
    return gear.ReplayDataset(
        table,
        batch_size=64,
        windows=gear.Window(8),
        sampler=gear.Prioritized(alpha=0.7, beta=0.5),
        batches_per_epoch=batches,
        prefetch=0,  # so that a killed server has drawn nothing by older priorities
        device="cpu",
        seed=7,
    )


def learn(batches: gear.ReplayDataset, file: Path | None, pause: float = 0.0) -> tuple[float, int]:
    """Train on an epoch, from the state in a file; the error of the weights, and a checksum of all batches."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    done, total = 0, 0
    if file is not None and file.exists():
        state = torch.load(file)
        batches.load_state_dict(state["dataset"])
        model.load_state_dict(state["model"])
        done, total = state["done"], state["total"]
    for batch in batches:
        error = (model(batch["x"]).squeeze(-1) - batch["y"]) * batch["mask"]
        loss = (batch["priority_weight"] * error.square().mean(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done, total = done + 1, zlib.crc32(batch["x"].numpy().tobytes(), total)
        if done % SAVE == 0:
            batches.update_priority(batch, error.detach().abs().mean(1))
        if done % SAVE == 0 and file is not None:
            state = {
                "dataset": batches.state_dict(),
                "model": model.state_dict(),
                "done": done,
                "total": total,
            }
            torch.save(state, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            print(f"batch {done}", flush=True)
            time.sleep(pause)
    return float((model.weight.detach() - TRUTH).abs().max()), total


def learner(url: str, file: Path, batches: int) -> None:
    """What the process of the learner does."""
    with gear.connect(url) as remote:  # the secret is in the environment
        error, total = learn(dataset(remote, batches), file, pause=0.05)
    print(f"learnt with an error of {error:.3f}; the sum of the batches is {total}", flush=True)


def start(url: str, file: Path, batches: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--learn", url, "--file", str(file), "--batches", str(batches)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def until(process: subprocess.Popen[str], batch: int) -> None:
    """Wait until a learner has trained on so many batches."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("batch") and int(line.split()[1]) >= batch:
            return
    raise SystemExit("The learner has ended too early.")


def main(batches: int) -> None:
    os.environ["GEAR_LOADER_SECRET"] = secrets.token_hex(32)
    secret = os.environ["GEAR_LOADER_SECRET"].encode()
    table = filled()
    server = table.serve(secret=secret, allow="all")
    port = int(server.url.split(":")[2].split("/")[0])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.pt"
        process = start(server.url, file, batches)
        try:
            until(process, batches // 4)
            print("The server is killed and started again.")
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
            server = table.serve(secret=secret, allow="all", port=port)
            until(process, batches // 2)
            print("The learner is killed; another one goes on with its state.")
            process.kill()
            process.wait()
            process = start(server.url, file, batches)
            said = process.communicate(timeout=100)[0].splitlines()[-1]
            print(f"The learner has {said}.")
        finally:
            process.kill()
            process.wait()
            server.stop()
    table.unlink()
    again = filled()
    error, total = learn(dataset(again, batches), None)
    again.unlink()
    if not said.endswith(f" {total}") or error > 0.1:
        sys.exit(f"A learner that nothing happened to has an error of {error:.3f} and the sum {total}.")
    print("Its batches are those of a learner that nothing happened to.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=200, help="batches of the learner")
    parser.add_argument("--learn", metavar="URL", help="be the learner of this server")
    parser.add_argument("--file", type=Path, help="of the learner's state")
    given = parser.parse_args()
    if given.learn:
        learner(given.learn, given.file, given.batches)
    else:
        main(given.batches)

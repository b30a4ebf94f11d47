"""``python -m benchmarks simulator``: what a simulator of n environments pays for keeping its steps.

All values of a step are there as one tensor a column, `[n, ...]`, 516 bytes an environment, on the CPU or, with
``--device cuda``, on the GPU. The yardstick is a ring of plain tensors on the same device, as FastTD3 has: one copy a
column and step. Ours are ``Table.writers(n, chunk_steps=32, device=...)``; the same without chunks, where a mask on
the device ends trajectories after 32 steps; and the writer without `device`, which takes the tensors too and copies
them to the host first. On a GPU also a table in its memory, and a ring in pinned host memory. A measurement ends when
all steps are in their place; `extras`: seconds of the host for a step, until then.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch

import gear_loader as gear
from benchmarks.harness import Incorrect, Medians, Session, Variant
from benchmarks.options import described, experiment, numbers

COLUMNS = {"obs": (96,), "action": (30,), "reward": (), "terminated": (), "number": ()}
DTYPES = {"terminated": torch.int32, "number": torch.int32}
STEP_BYTES = 516
CHUNK, CHUNKS = 32, 8
"""Steps of a trajectory, and trajectories of an environment that the stores hold."""
YARDSTICK = "ring"
POOL = 16
"""Steps that are there; they are written again and again."""

Rows = Mapping[str, torch.Tensor]


@experiment("simulator", repeats=(2, 9, 7))
def command(
    session: Session,
    envs: Annotated[str | None, described("Environments: 64,1024,4096 by default.")] = None,
) -> None:
    """What a simulator of thousands of environments pays for keeping its steps."""
    chosen = numbers(envs, "--envs", 1, 2**16) or ((64,) if session.quick else (64, 1024, 4096))
    session.configure(envs=chosen, chunk_steps=CHUNK)
    device = torch.device("cuda", torch.cuda.current_device()) if session.cuda else torch.device("cpu")
    for n in session.each("simulator", chosen, "{:,} environments".format):
        with Stores(n, device) as stores:
            variants = stores.variants()
            session.compare(
                "append", f"{n:,} environments", variants, YARDSTICK, {"envs": n, "chunk_steps": CHUNK}
            )


class Stores:
    """Steps of n environments, and everything that they are written into."""

    def __init__(self, n: int, device: torch.device) -> None:
        self._n, self._device = n, device
        self._pool = [self._step(number) for number in range(POOL)]
        self._turn = 0
        self._masks = [torch.full((n,), ends, dtype=torch.bool, device=device) for ends in (False, True)]
        size = n * CHUNK * (CHUNKS + 3)
        self._tables = [
            gear.Table.create(
                {
                    name: gear.Column(DTYPES.get(name, torch.float32), shape)
                    for name, shape in COLUMNS.items()
                },
                max_steps=size,
                max_trajectories=n * (CHUNKS + 3),
                block_steps=CHUNK,
                on_full="evict_oldest",
                device=home,
            )
            for home in (None, None, None, *([device] if device.type == "cuda" else []))
        ]

    def _step(self, number: int) -> Rows:
        made = {
            name: torch.full(
                (self._n, *shape), number, dtype=DTYPES.get(name, torch.float32), device=self._device
            )
            for name, shape in COLUMNS.items()
        }
        made["obs"] += torch.arange(self._n, device=self._device)[:, None] % 1000 * POOL
        return made

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        for table in self._tables:
            table.close()

    def variants(self) -> list[Variant]:
        """The yardstick, and the other ways."""
        ours, episodes, host, *homes = self._tables
        with_device = ours.writers(self._n, chunk_steps=CHUNK, device=self._device)
        ending = episodes.writers(self._n, device=self._device)
        without = host.writers(self._n, chunk_steps=CHUNK)
        made = [
            self._ring(YARDSTICK, pinned=False),
            self._writer("ours", with_device.append, with_device.commit, ours),
            self._writer(
                "ours, episodes", functools.partial(self._append_ending, ending), ending.commit, episodes
            ),
            self._writer("ours, without device", without.append, lambda: None, host),
        ]
        for home in homes:
            writer = home.writers(self._n, chunk_steps=CHUNK, device=self._device)
            made.append(self._writer("ours, table on the device", writer.append, writer.commit, home))
            made.append(self._ring("ring in pinned memory", pinned=True))
        return made

    def _variant(
        self, name: str, write: Callable[[Rows], object], end: Callable[[], object], check: Callable[[], None]
    ) -> Variant:
        steps, host = 4 * CHUNK, Medians()

        def measure() -> float:
            self._wait()
            begin = time.perf_counter()
            for _ in range(steps):
                write(self._pool[self._turn % POOL])
                self._turn += 1
            host.note(host_seconds=(time.perf_counter() - begin) / steps)
            end()
            self._wait()
            return time.perf_counter() - begin

        def checked() -> None:
            measure()
            check()
            host.clear()

        return Variant(name, measure, checked, self._n * STEP_BYTES, steps, extras=host)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _ring(self, name: str, *, pinned: bool) -> Variant:
        place: dict[str, Any] = {"device": "cpu", "pin_memory": True} if pinned else {"device": self._device}
        ring = {
            column: torch.zeros((CHUNK * CHUNKS, *values.shape), dtype=values.dtype, **place)
            for column, values in self._pool[0].items()
        }
        at = [0]

        def write(rows: Rows) -> None:
            for column, values in rows.items():
                ring[column][at[0]].copy_(values, non_blocking=True)
            at[0] = (at[0] + 1) % (CHUNK * CHUNKS)

        def check() -> None:
            for column, expected in self._pool[(self._turn - 1) % POOL].items():
                if not torch.equal(ring[column][at[0] - 1].to(self._device), expected):
                    raise Incorrect(f"the last step of {column} is not what was written")

        return self._variant(name, write, lambda: None, check)

    def _writer(
        self, name: str, append: Callable[[Rows], object], commit: Callable[[], object], table: gear.Table
    ) -> Variant:
        check = functools.partial(self._check, table)
        return self._variant(name, append, commit, check)

    def _append_ending(self, writer: gear.DeviceWriter, rows: Rows) -> None:
        """Append a step; all trajectories end with the last step of each 32."""
        writer.append(rows, done=self._masks[(self._turn + 1) % CHUNK == 0])

    def _check(self, table: gear.Table) -> None:
        """Each trajectory has consecutive steps of one environment."""
        indices = table.indices()
        if len(indices) < self._n * 4:
            raise Incorrect(f"the table has {len(indices)} trajectories; expected {self._n * 4}")
        for position, index in list(enumerate(indices.tolist()))[-self._n * 4 :: max(1, self._n // 8)]:
            found = table[index]
            number = found["number"]
            env = position % self._n
            right = torch.equal((number[1:] - number[:-1]) % POOL, torch.ones_like(number[1:]))
            right &= torch.equal(found["obs"], (number + env % 1000 * POOL).float()[:, None].expand(-1, 96))
            right &= torch.equal(found["action"], number.float()[:, None].expand(-1, 30))
            if not right or len(number) != CHUNK:
                raise Incorrect(f"trajectory {index} is not what environment {env} has done")

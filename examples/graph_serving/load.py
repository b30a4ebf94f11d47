"""Open-loop load: requests come at random times, whether earlier ones were answered or not."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import aiohttp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Load:
    """rate: requests a second that came. seconds: float64 [n], latencies, from when a request was due to its answer.

    refused: answers 429. elapsed: seconds until the last answer.
    """

    rate: float
    seconds: np.ndarray
    refused: int
    elapsed: float

    @property
    def throughput(self) -> float:
        return len(self.seconds) / self.elapsed


def popular_nodes(degrees: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Nodes of requests: in proportion to (rank by degree) ** -0.9, int64 [count]."""
    order = np.argsort(-degrees, kind="stable")
    weights = np.arange(1, len(order) + 1) ** -0.9
    return order[np.random.default_rng(seed).choice(len(order), size=count, p=weights / weights.sum())]


async def send(url: str, nodes: np.ndarray, rate: float, seed: int) -> Load:
    """Send one request for each node, with exponential gaps of mean 1 / rate."""
    due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, size=len(nodes)))
    seconds: list[float] = []
    refused = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()

        async def one(node: int, at: float) -> None:
            nonlocal refused
            async with session.post(f"{url}/predict", json={"nodes": [node]}) as answer:
                await answer.read()
                if answer.status == 429:
                    refused += 1
                    return
                answer.raise_for_status()
            seconds.append(time.perf_counter() - began - at)

        sent = []
        for node, at in zip(nodes.tolist(), due.tolist(), strict=True):
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            sent.append(asyncio.create_task(one(node, at)))
        await asyncio.gather(*sent)
        elapsed = time.perf_counter() - began
    return Load(rate, np.array(seconds), refused, elapsed)

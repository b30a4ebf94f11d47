"""The server: requests for nodes come in by HTTP, are batched, sampled, gathered and classified.

    POST /predict {"nodes": [3, 17]}   ->   {"scores": [[...], [...]]}

404: a node that the graph does not have; 400: a request of another form; 429 with Retry-After: too many wait.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
from aiohttp import web
from callgraph import CLASSES, FEATURES

import gear_loader as gear
from gear_loader.errors import GearError, OverloadError, UnknownNodeError

FANOUTS = [8, 8]
"""The same for both hops: so a prediction does not depend on what else is in the batch."""


class Predictor:
    """Scores of nodes: sampled by the sampler that is faster for so many, with features out of the table."""

    def __init__(self, graph: gear.graph.Graph, features: gear.Features, model: torch.nn.Module) -> None:
        self.features, self.model = features, model.eval()
        self.router = gear.graph.Router(
            gear.graph.NeighborSampler(graph, FANOUTS).sample,
            gear.graph.NeighborSampler(graph, FANOUTS, threads=len(os.sched_getaffinity(0))).sample,
            gear.graph.sampled_size(graph, FANOUTS),
        )

    @torch.inference_mode()
    def __call__(self, nodes: np.ndarray) -> torch.Tensor:
        found = self.router(nodes)
        scores: torch.Tensor = self.model(self.features[found.n_id], found.edge_index)[: len(nodes)]
        return scores


def application(batcher: gear.graph.RequestBatcher, predictor: Predictor) -> web.Application:
    async def predict(request: web.Request) -> web.Response:
        try:
            nodes = (await request.json())["nodes"]
            future = batcher.submit(nodes)
        except UnknownNodeError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        except OverloadError as error:
            headers = {"Retry-After": str(math.ceil(error.retry_after))}
            raise web.HTTPTooManyRequests(text=str(error), headers=headers) from error
        except (GearError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise web.HTTPBadRequest(text=f"expected {{'nodes': [ids]}}: {error}") from error
        # If the client goes away, this is cancelled, and the request with it.
        scores = await asyncio.wrap_future(future)
        return web.json_response({"scores": scores.tolist()})

    async def stats(_: web.Request) -> web.Response:
        router = predictor.router
        threshold = router.threshold if math.isfinite(router.threshold) else None
        shown = {"requests": vars(batcher.stats), "routed": router.routed, "threshold": threshold}
        shown["router"] = str(router)
        return web.json_response(shown)

    app = web.Application()
    app.router.add_post("/predict", predict)
    app.router.add_get("/stats", stats)
    return app


async def serve(batcher: gear.graph.RequestBatcher, predictor: Predictor) -> None:
    """Serve on a free port of loopback, which is printed, until standard input ends."""
    runner = web.AppRunner(application(batcher, predictor), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="graph.pt and model.pt, which __main__.py writes")
    parser.add_argument("--table", required=True, help="name of the table with the features")
    arguments = parser.parse_args()
    from model import Sage  # PyTorch Geometric takes seconds to import

    # Of so small a model, on cores that others use too: a thread that waits for another one costs more than it does.
    torch.set_num_threads(1)
    indptr, indices = torch.load(arguments.folder / "graph.pt", mmap=True)
    model = Sage(FEATURES, 64, CLASSES)
    model.load_state_dict(torch.load(arguments.folder / "model.pt"))
    graph = gear.graph.Graph(indptr, indices)
    with gear.Table.attach(arguments.table) as table:
        predictor = Predictor(graph, gear.Features(table, "x"), model)
        with gear.graph.RequestBatcher(
            predictor, graph.num_nodes, max_batch=256, max_wait=0.001, max_waiting=512
        ) as batcher:
            gc.freeze()  # else a full collection looks at all that torch has loaded, and requests wait for 150 ms
            asyncio.run(serve(batcher, predictor))


if __name__ == "__main__":
    main()

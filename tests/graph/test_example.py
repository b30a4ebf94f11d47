"""Parts of examples/graph_serving: its layer, its call graph, and the server's answers."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_common import random_graph

from gear_loader.graph import NeighborSampler, RequestBatcher

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "graph_serving"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the example by its name there."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("callgraph", "load", "model", "serving")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.long  # to import PyTorch Geometric takes seconds
@pytest.mark.filterwarnings("ignore")  # of PyTorch Geometric, about torch
def test_a_prediction_is_that_of_the_node_alone(example: Any) -> None:
    """PyTorch Geometric's layers on our subgraphs: in a batch, alone, and by the definition of the mean."""
    pytest.importorskip("torch_geometric")
    model = example("model").Sage(5, 4, 3).eval()
    graph = random_graph(50, 400, 0)
    sampler = NeighborSampler(graph, [4, 4])
    x = torch.randn(50, 5, generator=torch.Generator().manual_seed(1))
    together = sampler.sample([3, 1, 8])
    with torch.inference_mode():
        batch = model(x[together.n_id], together.edge_index)[:3]
        for row, node in enumerate([3, 1, 8]):
            alone = sampler.sample([node])
            torch.testing.assert_close(model(x[alone.n_id], alone.edge_index)[0], batch[row])
        layer, (sources, targets) = model.first, together.edge_index
        values = x[together.n_id]
        mean = torch.stack([values[sources[targets == i]].mean(0) for i in range(3)])
        expected = layer.lin_l(mean) + layer.lin_r(values[:3])
        torch.testing.assert_close(layer(values, together.edge_index)[:3], expected)


def test_calls_between_files(example: Any, tmp_path: Path) -> None:
    callgraph = example("callgraph")
    root = tmp_path / "site-packages"
    (root / "one").mkdir(parents=True)
    (root / "one" / "a.py").write_text(
        "def helper(value): pass\n"
        "class Thing:\n    def run(self, count):\n        helper(count); self.helper(); other(); rare(); len([])\n"
    )
    (root / "one" / "b.py").write_text("def other():\n    def inner(): other()\n    inner()\n")
    (root / "two.py").write_text("def rare(): helper()\n")
    (root / "wrong.py").write_text("def broken(:\n")
    files = sorted(root.rglob("*.py"))
    graph = callgraph._built(files)
    assert graph.names == ["one.a.Thing.run", "one.a.helper", "one.b.other", "one.b.other.inner", "two.rare"]
    calls = {(graph.names[one], graph.names[other]) for one, other in graph.edge_index.T.tolist()}
    one_way = {
        ("one.a.Thing.run", "one.a.helper"),
        ("one.a.Thing.run", "one.b.other"),
        ("one.a.Thing.run", "two.rare"),
        ("one.b.other", "one.b.other.inner"),
        ("two.rare", "one.a.helper"),
    }
    assert calls == one_way | {(other, one) for one, other in one_way}
    assert graph.y.tolist() == [0, 0, 0, 0, 1]
    assert graph.packages == ["one", "two", "others"]
    assert graph.x.shape == (5, callgraph.FEATURES)
    assert len(np.unique(graph.x, axis=0)) == 5


def test_popular_nodes_are_asked_for_more(example: Any) -> None:
    pytest.importorskip("aiohttp")
    nodes = example("load").popular_nodes(np.array([1, 50, 3, 4]), 4000, seed=0)
    assert np.argsort(-np.bincount(nodes, minlength=4)).tolist() == [1, 3, 2, 0]


def test_answers_of_the_server(example: Any) -> None:
    """Scores; 404 with the ids; 400; 429 with Retry-After; a client that goes away."""
    aiohttp = pytest.importorskip("aiohttp")
    serving = example("serving")
    began, go = threading.Event(), threading.Event()
    served: list[list[int]] = []

    class Predictor:
        router = type("Router", (), {"routed": {}, "threshold": float("inf")})

        def __call__(self, nodes: Any) -> torch.Tensor:
            served.append(nodes.tolist())
            began.set()
            assert go.wait(60)
            return torch.from_numpy(nodes).float()[:, None]

    async def talk(batcher: RequestBatcher) -> None:
        app = serving.application(batcher, Predictor())
        runner = aiohttp.web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:

            async def ask(body: str) -> tuple[int, str, Any]:
                async with session.post(f"{url}/predict", data=body) as answer:
                    return answer.status, await answer.text(), answer.headers

            status, text, _ = await ask('{"nodes": [3, 10]}')
            assert status == 404
            assert "node 10" in text
            for body in ("[]", "{", '{"node": 1}', '{"nodes": []}', '{"nodes": "a"}', '{"nodes": [0.5]}'):
                assert (await ask(body))[0] == 400, body
            first = asyncio.create_task(ask('{"nodes": [3]}'))
            await asyncio.to_thread(began.wait, 60)
            gone = asyncio.create_task(ask('{"nodes": [7]}'))
            stays = asyncio.create_task(ask('{"nodes": [5]}'))
            while batcher.stats.accepted < 3:
                await asyncio.sleep(0.01)
            status, _, headers = await ask('{"nodes": [1]}')
            assert status == 429
            assert int(headers["Retry-After"]) >= 1
            gone.cancel()
            while not any(request.future.cancelled() for request in batcher._waiting):
                await asyncio.sleep(0.01)
            go.set()
            assert (await first)[:2] == (200, '{"scores": [[3.0]]}')
            assert (await stays)[:2] == (200, '{"scores": [[5.0]]}')
            async with session.get(f"{url}/stats") as answer:
                shown = await answer.json()
            assert shown["requests"]["refused"] == shown["requests"]["cancelled"] == 1
        await runner.cleanup()

    with RequestBatcher(Predictor(), 10, max_wait=0, max_waiting=2) as batcher:
        asyncio.run(talk(batcher))
    assert served == [[3], [5]]

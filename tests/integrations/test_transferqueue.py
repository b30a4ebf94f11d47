"""TransferQueue with samples in a table: a run that is killed whole, and the next one, that has all that was put."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gear_loader.storage.shared_memory import region_path

pytest.importorskip(
    "transfer_queue", reason="needs TransferQueue: make peers ARGS='.peers transferqueue', test_own_tests.py"
)
psutil = pytest.importorskip("psutil")

PROGRAM = """
import json, os, signal, sys, time
import gear_loader.integrations.transfer_queue
import ray, torch, transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

name, path, again = sys.argv[1:]
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
ours = {"name": name, "path": path, "memory": "64MiB", "sync": True, "sync_seconds": 100.0}
tq.init(OmegaConf.create({"backend": {"storage_backend": "GearLoader", "GearLoader": ours}}))

def fields(numbers):
    texts = [f"text {i}" for i in numbers]
    ids = torch.nested.as_nested_tensor([torch.arange(i + 1) for i in numbers], layout=torch.jagged)
    return TensorDict({"ids": ids, "score": torch.tensor(numbers) * 1.0, "text": texts}, batch_size=len(numbers))

def put(numbers):
    tq.kv_batch_put([f"key{i}" for i in numbers], f"train{numbers[0] // 20}", fields=fields(numbers),
                    tags=[{"step": i} for i in numbers])

@ray.remote(num_cpus=0)
def elsewhere(numbers):
    put(numbers)  # a process that imports nothing of ours by itself
    return os.getpid()

if again == "no":
    put([0, 1, 2, 3, 4])
    ray.get(elsewhere.remote([20, 21, 22]))
    owner = ray.get_actor(f"GearLoader-{name}", namespace="transfer_queue")
    killed = ray.get(owner.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(killed, signal.SIGKILL)
    put([5, 6])
    tq.kv_clear(["key1", "key5"], "train0")
    late = TensorDict({"advantage": torch.tensor([0.5, 2.5])}, batch_size=2)
    tq.kv_batch_put(["key0", "key2"], "train0", fields=late)
    print("put", flush=True)
    time.sleep(100)
left = {key: tag["step"] for part in tq.kv_list().values() for key, tag in part.items()}
assert sorted(left) == sorted(f"key{i}" for i in (0, 2, 3, 4, 6, 20, 21, 22)), left
for numbers, part in (([6, 0, 3, 2, 4], "train0"), ([22, 20, 21], "train1")):
    keys = [f"key{i}" for i in numbers]
    assert [left[key] for key in keys] == numbers
    found = tq.kv_batch_get(keys, part, select_fields=["ids", "score", "text"])
    assert [each.tolist() for each in found["ids"].unbind()] == [list(range(i + 1)) for i in numbers]
    assert found["score"].tolist() == numbers
    assert list(found["text"]) == [f"text {i}" for i in numbers]
assert tq.kv_batch_get(["key2", "key0"], "train0", select_fields="advantage")["advantage"].tolist() == [2.5, 0.5]
put([7, 1])
assert tq.kv_batch_get(["key1", "key0"], "train0", select_fields="score")["score"].tolist() == [1, 0]
tq.close()
print("all there", flush=True)
"""

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "transfer-queue.md"
ENVIRONMENT = {**os.environ, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.long
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    name = f"page-{np.random.default_rng().integers(1 << 40)}"
    (found,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.S | re.M)
    program = found.replace('{"memory"', f'{{"name": "{name}", "memory"')
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("'prompt7-1': {'version': 3}") == 2, done.stdout
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(region_path(name))


@pytest.mark.long
def test_a_run_that_is_killed_whole_and_its_machines_memory_lost(tmp_path: Path) -> None:
    name = f"killed-{np.random.default_rng().integers(1 << 40)}"
    command = [sys.executable, "-c", PROGRAM, name, str(tmp_path / "disk")]
    first = subprocess.Popen(
        [*command, "no"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert first.stdout is not None
    assert first.stderr is not None
    said = first.stdout.readline()
    whole = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    for each in whole:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGKILL)
    psutil.wait_procs(whole, timeout=30)
    assert said == "put\n", first.communicate(timeout=30)[1][-3000:]
    first.communicate(timeout=30)
    os.unlink(region_path(name))
    try:
        second = subprocess.run(
            [*command, "yes"], capture_output=True, text=True, env=ENVIRONMENT, timeout=280
        )
        assert second.stdout.endswith("all there\n"), second.stdout[-1000:] + second.stderr[-3000:]
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(region_path(name))

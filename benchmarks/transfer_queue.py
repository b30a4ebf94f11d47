"""Put and get of TransferQueue's client, with samples in its simple storage and in a table of ours.

    .peers/transferqueue/bin/python -m benchmarks.transfer_queue [--fields 1,8,32] [--clients 1,4,16] [--seconds 1]

One controller serves both storages: the simple one with two units, and ours. Clients are processes that have a client
of each. All do the same at the same time, with 64 samples of their own, each field of 8 KiB: `put`, which replaces the
samples and tells the controller, and `get_data` by metadata that is there, which asks the storage alone. What was read
is compared with what was put first. Storages take turns; figures are medians over these, ratios those of pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

SAMPLES, VALUE, UNITS, TURNS = 64, 8 << 10, 2, 5
THEIRS, OURS = "SimpleStorage", "GearLoader"


class Client:
    """A client of each storage.

    Args:
        config: of the controller, with a section of each storage. number: of the process.
    """

    def __init__(self, config: Any, number: int) -> None:
        import torch
        from transfer_queue.client import TransferQueueClient

        torch.set_num_threads(1)
        self.number, self.clients = number, {}
        for kind in (THEIRS, OURS):
            client = TransferQueueClient(f"{kind}-{number}", config.controller.zmq_info)
            client.initialize_storage_manager(kind, config.backend[kind])
            self.clients[kind] = client

    def fill(self, fields: int) -> None:
        """Put samples of so many fields into both, and compare what comes back."""
        import torch
        from tensordict import TensorDict

        values = [[torch.rand(VALUE // 4) for _ in range(SAMPLES)] for _ in range(fields)]
        jagged = [torch.nested.as_nested_tensor(each, layout=torch.jagged) for each in values]
        self.data = TensorDict({f"field{i}": each for i, each in enumerate(jagged)}, batch_size=SAMPLES)
        self.metadata = {}
        for kind, client in self.clients.items():
            place = f"{kind}-{self.number}-{fields}"
            self.metadata[kind] = client.put(self.data, partition_id=place)
            found = client.get_data(self.metadata[kind])
            for i, each in enumerate(values):
                if not all(map(torch.equal, each, found[f"field{i}"].unbind())):
                    raise ValueError(f"{kind} returned other values than were put")

    def run(self, kind: str, what: str, seconds: float) -> float:
        """Seconds of a call, on average over at least so many seconds."""
        client, metadata = self.clients[kind], self.metadata[kind]
        count, began = 0, time.perf_counter()
        while not count or time.perf_counter() - began < seconds:
            client.put(self.data, metadata) if what == "put" else client.get_data(metadata)
            count += 1
        return (time.perf_counter() - began) / count

    def clear(self, fields: int) -> None:
        """Remove the samples of `fill`."""
        for kind, client in self.clients.items():
            client.clear_partition(f"{kind}-{self.number}-{fields}")


class Process:
    """A process with a `Client`; it is forked before anything starts threads, and begins with its first command."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, number), daemon=True)
        self._process.start()

    def send(self, *command: Any) -> None:
        """A method of `Client` with its arguments; the first command is the configuration."""
        self._pipe.send(command)

    def receive(self) -> Any:
        """The answer to a command.

        Raises:
            RuntimeError: it failed, or took five minutes.
        """
        if not self._pipe.poll(300):
            raise RuntimeError("a client has not answered for five minutes")
        answer, error = self._pipe.recv()
        if error:
            raise RuntimeError(error)
        return answer


def _serve(pipe: Any, number: int) -> None:
    client: Any = None
    while True:
        command = pipe.recv()
        try:
            if client is None:
                client, answer = Client(*command, number), None
            else:
                answer = getattr(client, command[0])(*command[1:])
            pipe.send((answer, None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


def ask(processes: list[Process], *command: Any) -> list[Any]:
    """Send a command to some, and wait for all answers."""
    for each in processes:
        each.send(*command)
    return [each.receive() for each in processes]


def numbers(text: str) -> list[int]:
    """Of a list with commas."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fields", type=numbers, default=[1, 8, 32], help="default: 1,8,32")
    parser.add_argument("--clients", type=numbers, default=[1, 4, 16], help="default: 1,4,16")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement (default: %(default)s)")
    options = parser.parse_args()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": root, "TQ_NUM_THREADS": "1"}
    os.environ |= {"TQ_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}

    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    from gear_loader.integrations.transfer_queue import start

    every = [Process(number) for number in range(max(options.clients))]
    with tempfile.TemporaryDirectory(prefix="gear-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        sections = {
            THEIRS: {"total_storage_size": 1 << 17, "num_data_storage_units": UNITS},
            OURS: {"name": f"benchmark-{os.getpid()}", "memory": "2GiB"},
        }
        transfer_queue.init(OmegaConf.create({"backend": {"storage_backend": THEIRS, **sections}}))
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        config = ray.get(controller.get_config.remote())
        config.backend[OURS] = sections[OURS]
        owner = start(config)["owner"]
        try:
            ask(every, config)
            compare(every, options)
        finally:
            transfer_queue.close()
            with contextlib.suppress(ray.exceptions.ActorDiedError):
                ray.get(
                    owner.__ray_terminate__.options(max_task_retries=0).remote()
                )  # by which it frees the table
            ray.shutdown()


def compare(every: list[Process], options: argparse.Namespace) -> None:
    """Measure, and print a line of each setting."""
    print(f"milliseconds of a call, {SAMPLES} samples of {VALUE >> 10} KiB a field; load {os.getloadavg()}")
    print("what fields clients | simple storage | ours | ratio")
    for fields in options.fields:
        ask(every, "fill", fields)
        for what, count in itertools.product(("put", "get"), options.clients):
            turns = [
                [
                    statistics.mean(ask(every[:count], "run", name, what, options.seconds))
                    for name in (THEIRS, OURS)
                ]
                for _ in range(TURNS)
            ]
            theirs, ours = (1e3 * statistics.median(each) for each in zip(*turns, strict=True))
            ratio = statistics.median(first / second for first, second in turns)
            print(
                f"{what} {fields:6} {count:7} | {theirs:14.2f} | {ours:7.2f} | {ratio:5.2f}",
                flush=True,
            )
        ask(every, "clear", fields)


if __name__ == "__main__":
    main()

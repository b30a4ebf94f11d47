"""The device writer on the CPU, against what was appended; tests/schedules/test_written_streams.py plays a GPU."""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import RateLimitError, SchemaError, TableFullError
from gear_loader.storage.device_writer import DeviceWriter

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

SCHEMA = {
    "obs": gear.Column(torch.float32, (3,), final=True),
    "pixels": gear.Column(torch.uint8, (8, 20), final=True),
    "number": gear.Column(torch.int64),
    "half": gear.Column(torch.float16, (5,)),
    "done": gear.Column(torch.bool),
}


def rows(n: int, count: int, first: int) -> dict[str, torch.Tensor]:
    """Steps of n environments from `first` on, [n, count, ...], of which all values follow from the number."""
    number = torch.arange(first, first + count)[None] + 1000 * torch.arange(n)[:, None]
    return {
        "obs": (number[..., None] * 3 + torch.arange(3)).float(),
        "pixels": ((number[..., None, None] + torch.arange(20)) % 251)
        .expand(n, count, 8, 20)
        .to(torch.uint8),
        "number": number,
        "half": (number[..., None] % 100 + torch.arange(5)).half(),
        "done": number % 3 == 0,
    }


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def made(
    n: int = 3, chunk: int = 4, chunks: int = 40, size: int = 4, device: str = "cpu", **options: Any
) -> tuple[gear.Table, DeviceWriter]:
    memory = gear.Memory(packed=options.pop("packed", "auto"), max_blocks=chunks * -(-(chunk + 1) // size))
    table = gear.Table.create(
        SCHEMA,
        max_steps=chunks * (chunk + 1),
        max_trajectories=chunks,
        block_steps=size,
        memory=memory,
        **options,
    )
    return table, table.writers(n, chunk_steps=chunk, device=device)


CALLS = st.lists(
    st.one_of(st.just(("append",)), st.tuples(st.just("extend"), st.integers(1, 4)), st.just(("commit",))),
    max_size=25,
)


@DEVICES
@hypothesis.given(
    n=st.integers(1, 4), chunk=st.integers(1, 6), size=st.integers(1, 5), packed=st.booleans(), calls=CALLS,
    sliced=st.booleans(),
)  # fmt: skip
def test_what_was_appended_is_in_the_table(
    device: str, n: int, chunk: int, size: int, packed: bool, calls: list[Any], sliced: bool
) -> None:
    table, writer = made(n, chunk, n * 30, size, device, packed=packed)
    steps, cuts = 0, [0]
    with table:
        for call, *count in calls:
            if call == "commit":
                writer.commit()
                cuts += [steps] if steps > cuts[-1] else []
                assert len(table) == n * (len(cuts) - 1)
                continue
            some = min([1, *count][-1], chunk - writer.num_steps)
            values = rows(n, some, steps)
            if sliced:  # tensors that are not contiguous, and begin at an odd byte
                values = {
                    k: torch.cat([v[..., :1], v], -1)[..., 1:] if v.ndim > 2 else v for k, v in values.items()
                }
            values = {name: each.to(device) for name, each in values.items()}
            following = rows(n, 1, steps + some)
            final = {name: following[name][:, 0].to(device) for name in ("obs", "pixels")}
            if call == "append":
                writer.append({name: each[:, 0] for name, each in values.items()}, final=final)
            else:
                writer.extend(values, final=final)
            steps += some
            cuts += [steps] if steps - cuts[-1] == chunk else []
            assert writer.num_steps == steps - cuts[-1]
        writer.commit()
        cuts += [steps] if steps > cuts[-1] else []
        assert writer.committed == len(table) == n * (len(cuts) - 1)
        expected = rows(n, max(steps, 1), 0)
        for position, index in enumerate(table.indices().tolist()):
            part, env = divmod(position, n)
            begin, end = cuts[part], cuts[part + 1]
            for name, values in table[index].items():
                assert torch.equal(values, expected[name][env, begin:end]), name
            last = table.final(index)
            if end - begin == chunk:
                assert last is not None
                assert torch.equal(last["obs"], rows(n, 1, end)["obs"][env, 0])
                assert torch.equal(last["pixels"], rows(n, 1, end)["pixels"][env, 0])
            else:
                assert last is None
        table.check_valid()


def test_a_batch_of_transitions() -> None:
    table, writer = made()
    with table:
        for step in range(12):
            following = rows(3, 1, step + 1)
            final = {name: following[name][:, 0] for name in ("obs", "pixels")}
            writer.append({k: v[:, 0] for k, v in rows(3, 1, step).items()}, final=final, priority=1.0 + step)
        writer.commit()
        windows = {name: gear.Window(1, squeeze=True) for name in ("obs", "number")}
        windows["next_obs"] = gear.Window(1, 1, column="obs", squeeze=True)
        batch = gear.ReplayDataset(table, batch_size=64, windows=windows).sample()
        assert torch.equal(batch["next_obs"], batch["obs"] + 3)
        assert (
            table.priorities().tolist() == [4.0] * 3 + [8.0] * 3 + [12.0] * 3
            if hasattr(table, "priorities")
            else True
        )


def test_a_full_table_takes_the_call_again() -> None:
    table, writer = made(2, 3, 4)
    values = {name: each[:, 0] for name, each in rows(2, 1, 0).items()}
    with table:
        for _ in range(6):
            writer.append(values)
        for _ in range(2):
            with pytest.raises(TableFullError):
                writer.append(values)
            assert writer.num_steps == 0
        assert len(table) == 4
        table.clear()
        for _ in range(3):
            writer.append(values)
        assert writer.commit() == 2


def test_a_rate_limiter() -> None:
    table, writer = made(
        2, 2, timeout=0.02, rate_limiter=gear.SampleToInsertRatio(1.0, min_size=1, error_buffer=2.0)
    )
    values = {name: each[:, 0] for name, each in rows(2, 1, 0).items()}
    with table:
        writer.append(values)
        writer.append(values)
        append = functools.partial(writer.append, values)
        with pytest.raises(RateLimitError):
            collections.deque(iter(append, None), maxlen=0)  # until the error
        before = writer.num_steps, len(table), writer.committed
        with pytest.raises(RateLimitError):
            writer.append(values)
        assert before == (writer.num_steps, len(table), writer.committed)
        assert len(table) == writer.committed


def test_blocks_come_back_of_what_is_not_committed() -> None:
    table, writer = made(3, 4, 6)
    values = {name: each[:, 0] for name, each in rows(3, 1, 0).items()}
    with table:
        for _ in range(3):
            with contextlib.suppress(KeyError), table.writers(3, chunk_steps=4, device="cpu") as other:
                other.append(values)
                raise KeyError
        writer.append(values)
        del writer  # without `close`
        with table.writers(3, chunk_steps=4, device="cpu") as other:
            other.append(values)
        assert len(table) == 3


def append_for_long(pipe: Any, episodes: bool) -> None:
    with gear.Table.attach("device-killed") as table:
        writer = table.writers(3, device="cpu", **({} if episodes else {"chunk_steps": 4}))
        for step in range(10**6):
            options = {"done": torch.full((3,), step % 4 == 3)} if episodes else {}
            writer.append({name: each[:, 0] for name, each in rows(3, 1, step % 100).items()}, **options)
            if step == 20:
                pipe.send("going")


@pytest.mark.parametrize("episodes", [False, True])
def test_a_killed_process_leaves_whole_trajectories(episodes: bool) -> None:
    table, _ = made(name="device-killed", on_full="evict_oldest")
    with table:
        context = multiprocessing.get_context("forkserver")
        pipe, theirs = context.Pipe(duplex=False)
        process = context.Process(target=append_for_long, args=(theirs, episodes))
        process.start()
        theirs.close()
        assert pipe.recv() == "going"
        process.kill()
        process.join()
        pipe.close()
        table.check_valid()
        for index in table.indices().tolist():
            number = table[index]["number"]
            assert np.diff(number.numpy() % 1000 % 100).tolist() in (
                [1] * 3,
                [1, 1, -99],
                [1, -99, 1],
                [-99, 1, 1],
            )
        with table.writers(3, chunk_steps=4, device="cpu") as writer:  # the blocks of the dead are taken back
            for step in range(80):
                writer.append({name: each[:, 0] for name, each in rows(3, 1, step).items()})
        table.unlink()


def test_what_does_not_fit() -> None:
    table, writer = made()
    with table:
        values = {name: each[:, 0] for name, each in rows(3, 1, 0).items()}
        for options, expected in (
            ({"device": "cpu", "chunk_steps": 4, "overlap_steps": 1}, "overlap_steps=1"),
            ({"device": "cpu", "chunk_steps": 4, "commit_every_step": True}, "commit_every_step=True"),
            ({"device": "cpu", "chunk_steps": 0}, "chunk_steps is 0"),
            ({"device": "gpu", "chunk_steps": 4}, "device is 'gpu'"),
            ({"device": "cpu", "chunk_steps": 60}, "2 each; the table has 40, 200 and 80"),
        ):
            with pytest.raises(SchemaError, match=expected):
                table.writers(3, **options)
        with pytest.raises(
            SchemaError, match=r"'obs' of the rows is .*; expected a tensor of torch.float32 \[3, 3\]"
        ):
            writer.append({**values, "obs": values["obs"].double()})
        for _ in range(3):
            writer.append(values, final={"obs": values["obs"]})  # not read
        with pytest.raises(
            SchemaError, match=r"The final values have the columns \['obs'\]; expected \['obs', 'pixels'\]"
        ):
            writer.append(values, final={"obs": values["obs"]})
        assert writer.num_steps == 3
        with pytest.raises(SchemaError, match=r"The rows have 2 steps; expected .* 1 to 1, which are left"):
            writer.extend(rows(3, 2, 0))
        assert writer.num_steps == 3
    once = gear.Table.create(
        {"a": gear.Column(torch.float32), "b": gear.Column(torch.float32, per="trajectory")},
        max_steps=100,
        max_trajectories=20,
    )
    with once, pytest.raises(SchemaError, match=r"\['b'\] have one value a trajectory"):
        once.writers(2, chunk_steps=2, device="cpu")


# ---------------------------------------------------------------- episodes


def played(n: int, steps: int, seed: int, share: float) -> list[tuple[dict[str, Any], Any, dict[str, Any]]]:
    """Rows, masks of what ends, and final values of steps of n environments."""
    random = np.random.default_rng(seed)
    made = []
    for step in range(steps):
        values = {name: each[:, 0] for name, each in rows(n, 1, step).items()}
        following = rows(n, 1, step + 1)
        final = {name: following[name][:, 0] for name in ("obs", "pixels")}
        made.append((values, torch.from_numpy(random.random(n) < share), final))
    return made


def same_tables(found: gear.Table, expected: gear.Table) -> None:
    """Both have the same trajectories, in the same order."""
    assert len(found) == len(expected)
    pairs = zip(found.indices().tolist(), expected.indices().tolist(), strict=True)
    for one, other in pairs:
        for name, values in expected[other].items():
            assert torch.equal(found[one][name], values), name
        last, wanted = found.final(one), expected.final(other)
        assert (last is None) == (wanted is None)
        for name in wanted or ():
            assert torch.equal(last[name], wanted[name])  # type: ignore[index]


@DEVICES
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("finals", [True, False])
def test_episodes_are_those_of_a_vector_writer(device: str, size: int, finals: bool) -> None:
    """Also with priorities, rows that lie apart, and `commit` in between, after which others begin."""
    steps = played(3, 30, size, 0.3)
    options: Any = {"block_steps": size, "max_steps": 2000, "max_trajectories": 200}
    with gear.Table.create(SCHEMA, **options) as table, gear.Table.create(SCHEMA, **options) as other:
        writer, expected = table.writers(3, device=device), other.writers(3)
        for t, (values, done, final) in enumerate(steps):
            given = {name: each.to(device) for name, each in values.items()}
            after = {name: each.to(device) for name, each in final.items()}
            options = {"final": after if finals else None, "priority": 1.0 + t}
            writer.append(given, done=done.to(device) if t % 7 else None, **options)
            options["final"] = final if finals else None
            expected.append(values, done=done if t % 7 else None, **options)
            for each in (*given.values(), *after.values()):
                if device != "cpu":
                    each.fill_(1)  # they have been copied, in the order of the stream
            if t in (11, 29):
                writer.commit()
                expected.commit()
                same_tables(table, other)
        assert writer.committed == len(table)
        priorities = [
            each._engine.reader().arrays.priority[each.indices()].tolist() for each in (table, other)
        ]
        assert priorities[0] == priorities[1]
        table.check_valid()


def test_an_episode_too_long_or_no_room() -> None:
    options: Any = {"block_steps": 2, "max_steps": 24, "max_trajectories": 8}
    with gear.Table.create(SCHEMA, **options) as table:
        writer = table.writers(1, device="cpu")
        for values, _, _ in played(1, 23, 0, 0.0):
            writer.append(values)
        with pytest.raises(SchemaError, match="would have 25 steps; this table holds at most 24"):
            writer.append(values)
        assert writer.commit() == 1
    values = {name: each[:, 0] for name, each in rows(2, 1, 0).items()}
    over = torch.ones(2, dtype=torch.bool)
    with gear.Table.create(SCHEMA, **options) as table, table.writers(2, device="cpu") as writer:
        for _ in range(5):
            writer.append(values, done=over)
        for _ in range(2):
            with pytest.raises(TableFullError):
                writer.append(values, done=over)
            assert len(table) == writer.committed == 8
        table.clear()
        assert writer.append(values, done=over) == 2
        assert writer.commit() == 2
        with pytest.raises(SchemaError, match=r"'done' of the options is .*expected a tensor of torch.bool"):
            writer.append(values, done=[True, False])
        with pytest.raises(SchemaError, match="needs a writer with chunk_steps"):
            writer.extend(rows(2, 2, 0))

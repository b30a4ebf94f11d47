"""Transforms of batches: built-in ones against plain torch, and what they keep across resumption."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import iterating
from hypothesis import given, settings
from hypothesis import strategies as st
from table_common import fresh_name
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader import transforms
from gear_loader.errors import SchemaError

SCHEMA = {
    "image": gear.Column(torch.uint8, (3, 8, 6)),
    "speed": gear.Column(torch.float32, (2,)),
}


def make_table(name: str | None = None, trajectories: int = 6) -> gear.Table:
    table = gear.Table.create(SCHEMA, max_steps=400, max_trajectories=20, name=name)
    rng = np.random.default_rng(0)
    for number in range(trajectories):
        length = 3 + 4 * number
        table.add(
            {
                "image": rng.integers(0, 256, (length, 3, 8, 6), dtype=np.uint8),
                "speed": rng.normal(5, 3, (length, 2)).astype(np.float32),
            }
        )
    return table


def dataset(table: gear.Table, transform: Any, **options: Any) -> gear.ReplayDataset:
    return gear.ReplayDataset(
        table,
        **{
            "batch_size": 5,
            "windows": gear.Window(4),
            "device": "cpu",
            "batches_per_epoch": 7,
            "transform": transform,
            **options,
        },
    )


def noise(batch: Any, generator: torch.Generator) -> Any:
    batch["noise"] = torch.rand(3, generator=generator)
    return batch


def equal(one: Any, other: Any) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def all_of_them() -> list[Any]:
    return [
        transforms.RandomShift("image", pad=2),
        transforms.ToDtype("image", scale=True),
        transforms.Normalize("speed"),
        noise,
    ]


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(3, 9),
    st.integers(3, 9),
    st.booleans(),
    st.sampled_from([torch.uint8, torch.float32, torch.int16]),
    st.integers(0, 1 << 30),
)
def test_a_crop_is_a_rectangle_of_the_padded_image(
    batch: int, padding: int, height: int, width: int, last: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 100, (batch, 2, 3, height, width), generator=generator).to(dtype)
    size = (
        min(3, height + 2 * padding),
        int(torch.randint(1, width + 2 * padding + 1, (), generator=generator)),
    )
    crop = transforms.RandomCrop("x", size=size, padding=padding, dims=(-3, -2) if last else (-2, -1))
    given_ = images.movedim(2, -1) if last else images
    found = crop({"x": given_.clone()}, generator=generator)["x"]
    found = found.movedim(-1, 2) if last else found
    assert found.dtype == dtype
    assert found.shape == (batch, 2, 3, *size)
    flat = images.double().flatten(1, 2)
    padded = torch.nn.functional.pad(flat, (padding,) * 4, mode="replicate") if padding else flat
    for row in range(batch):
        places = [
            padded[row, :, y : y + size[0], x : x + size[1]]
            for y in range(padded.shape[-2] - size[0] + 1)
            for x in range(padded.shape[-1] - size[1] + 1)
        ]
        assert any(torch.equal(found[row].double().flatten(0, 1), each) for each in places)


def test_rectangles_are_cut_alike_everywhere() -> None:
    planes = torch.randn(6, 4, 7, 9, dtype=torch.bfloat16)
    top, left = torch.randint(0, 4, (6,)), torch.randint(0, 5, (6,))
    cut = [each(planes, (4, 5), top, left) for each in (transforms._cut, transforms._cut_on_host)]
    assert torch.equal(*cut)


def test_places_of_a_shift_are_uniform_and_independent_by_row_and_column() -> None:
    rows, columns = torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    images = (rows * 100 + columns).expand(4_000, 1, 20, 20)
    shift = transforms.RandomShift("a", "b", pad=1)
    batch = shift({"a": images.clone(), "b": images.clone()}, generator=torch.Generator().manual_seed(0))
    places = [
        (batch[name][:, 0, 10, 10] // 100 - 9) * 3 + batch[name][:, 0, 10, 10] % 100 - 9 for name in "ab"
    ]
    pairs = torch.bincount(places[0] * 9 + places[1], minlength=81).double()
    expected = 4_000 / 81
    # 99.9% quantile of chi-square with 80 degrees of freedom
    assert ((pairs - expected) ** 2 / expected).sum() < 124.8


def test_the_evaluation_of_a_crop_is_its_middle() -> None:
    images = torch.arange(2 * 6 * 6).view(2, 1, 6, 6)
    generator = torch.Generator()
    crop = transforms.RandomCrop("x", size=4).evaluation()
    assert torch.equal(crop({"x": images}, generator=generator)["x"], images[..., 1:5, 1:5])
    shift = transforms.RandomShift("x", pad=2).evaluation()
    assert torch.equal(shift({"x": images}, generator=generator)["x"], images)


def test_dtypes_are_scaled_as_integers() -> None:
    values = torch.tensor([0, 7, 255], dtype=torch.uint8)
    batch = transforms.ToDtype("x", scale=True)({"x": values})
    assert torch.equal(batch["x"], torch.tensor([0, 7 / 255, 1.0]))
    assert transforms.ToDtype("x", dtype=torch.int32)({"x": values})["x"].dtype == torch.int32
    half = transforms.ToDtype("x", dtype=torch.bfloat16, scale=True)({"x": values})["x"]
    assert torch.equal(half, batch["x"].bfloat16())


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 1 << 30), st.booleans())
def test_statistics_are_those_of_all_values(sizes: list[int], seed: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    normalize = transforms.Normalize("x", "y", clip=2.0)
    seen: list[torch.Tensor] = []
    for size in sizes:
        values = torch.randn(size, 3, 2, generator=generator) * 5 + 100
        batch: dict[str, Any] = {"x": values, "y": values + 1}
        rows = values.flatten(0, 1) if masked else values
        if masked:
            batch["mask"] = torch.rand(size, 3, generator=generator) < 0.7
            rows = rows[batch["mask"].flatten()]
        seen.append(rows.double())
        found = normalize(dict(batch))
        every = torch.cat(seen)
        if len(every):
            mean, variance = every.mean(0), every.var(0, correction=0)
            for name in "xy":
                expected = ((batch[name].double() - mean) / (variance + 1e-8).sqrt()).clamp(-2, 2)
                if masked:
                    expected = expected * batch["mask"][..., None]
                steep = variance > 1e-6  # elsewhere rounding decides
                torch.testing.assert_close(
                    found[name].double()[..., steep] if masked else found[name].double() * steep,
                    expected[..., steep] if masked else expected * steep,
                    atol=1e-2, rtol=1e-3,
                )  # fmt: skip


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_resumed_dataset_goes_on(prefetch: int) -> None:
    table = make_table()
    whole = dataset(table, all_of_them(), prefetch=prefetch)
    sampled = whole.sample()
    batches = [*whole, *whole]
    assert not torch.equal(batches[0]["noise"], batches[7]["noise"])
    for stop in (3, 7, 9):
        first = dataset(table, all_of_them(), prefetch=prefetch)
        assert equal(first.sample(), sampled)
        found, state = [], {}
        for number, batch in enumerate((batch for _ in range(2) for batch in first), 1):
            found.append(batch)
            if number == stop:
                state = first.state_dict()
                break
        again = dataset(table, all_of_them(), prefetch=prefetch)
        again.load_state_dict(state)
        for _ in range(2):  # the first may be the end of epoch 0, with no batch left
            found += again
        found = found[:14]
        assert len(found) == 14
        assert all(equal(one, other) for one, other in zip(found, batches, strict=True))


def test_a_state_taken_a_batch_ahead_has_the_statistics_of_its_position() -> None:
    """As Lightning takes it: its loop has fetched one batch more than it has used."""
    table = make_table()
    whole = list(dataset(table, all_of_them()))
    ahead = dataset(table, all_of_them())
    iterator = iter(ahead)
    for _ in range(4):
        next(iterator)
    state = ahead.state_dict()
    state["step"] -= 1
    again = dataset(table, all_of_them())
    again.load_state_dict(state)
    assert all(equal(one, other) for one, other in zip(again, whole[3:], strict=True))


def test_samples_go_on() -> None:
    table = make_table()
    one, other = dataset(table, all_of_them()), dataset(table, all_of_them())
    for _ in range(3):
        one.sample()
    other.load_state_dict(one.state_dict())
    assert equal(one.sample(), other.sample())


def test_workers_and_layouts() -> None:
    table = make_table(fresh_name())
    try:
        parts = [noise, transforms.ToDtype("speed", dtype=torch.float64)]
        expected = [batch["noise"] for batch in dataset(table, parts)]
        for workers in (1, 2):
            loader = DataLoader(dataset(table, parts), batch_size=None, num_workers=workers)
            found = [batch["noise"] for batch in loader]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        refused: Any = DataLoader(dataset(table, all_of_them()), batch_size=None, num_workers=1)
        with iterating(refused) as batches, pytest.raises(SchemaError, match="use num_workers=0"):
            next(batches)
        frozen = transforms.Normalize("speed", frozen=True)
        next(iter(DataLoader(dataset(table, frozen), batch_size=None, num_workers=1)))
    finally:
        table.unlink()
    for layout in ("packed", "jagged"):
        batch = dataset(
            table, [transforms.Normalize("speed"), noise], windows=gear.Whole(), layout=layout
        ).sample()
        values = batch["speed"].values() if layout == "jagged" else batch["speed"]
        assert torch.allclose(values.mean(0), torch.zeros(2), atol=1e-5)
        assert batch["noise"].shape == (3,)
    padded = dataset(table, transforms.Normalize("speed"), windows=gear.Whole()).sample()
    there = padded["mask"]
    assert torch.allclose(padded["speed"][there].mean(0), torch.zeros(2), atol=1e-5)
    assert not padded["speed"][~there].any()
    tensordict = pytest.importorskip("tensordict")
    normalized = dataset(table, transforms.Normalize("speed"), output="tensordict").sample()
    assert isinstance(normalized, tensordict.TensorDict)


def test_rows_of_a_mixture_are_transformed_by_their_dataset() -> None:
    table = make_table()
    plain, shifted = (
        dataset(table, None),
        dataset(table, lambda batch: {**batch, "speed": batch["speed"] + 100}),
    )
    mixed = gear.Mixture({"a": (plain, 1.0), "b": (shifted, 1.0)}, batch_size=8, batches_per_epoch=3)
    batch = next(iter(mixed))
    assert (batch["speed"][4:][batch["mask"][4:]] > 50).all()
    assert (batch["speed"][:4] < 50).all()


def test_names_lead_into_nested_entries() -> None:
    batch: dict[str, Any] = {
        "obs": {"eyes": (torch.zeros(2), torch.ones(2)), "a.b": torch.ones(1)},
        "plain": 1,
    }
    double = transforms.ToDtype("obs.eyes.1", "obs.a.b", dtype=torch.float64)
    found = double(dict(batch))
    assert found["obs"]["eyes"][1].dtype == found["obs"]["a.b"].dtype == torch.float64
    assert found["obs"]["eyes"][0].dtype == batch["obs"]["eyes"][1].dtype == torch.float32
    for name in ("obs", "plain"):
        with pytest.raises(SchemaError, match="expected a tensor"):
            transforms.ToDtype(name)(dict(batch))
    with pytest.raises(SchemaError, match=r"'obs.tail'.*'obs.eyes.0', 'obs.eyes.1'"):
        transforms.ToDtype("obs.tail")(dict(batch))


WRONG: list[tuple[Any, str]] = [
    (3, "transform is 3; expected a function"),
    ("speed", "transform is 'speed'; expected a function"),
    ([noise, None], "expected a function that takes a batch"),
    (transforms.Normalize("sped"), r"names 'sped'; expected one of the windows, \['image', 'speed'"),
]


@pytest.mark.parametrize(("transform", "message"), WRONG)
def test_wrong_transforms_are_refused_when_the_dataset_is_made(transform: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        dataset(make_table(), transform)


WRONG_CALLS: list[tuple[Any, str]] = [
    (lambda batch: None, "returned None; expected the batch"),
    ([noise, transforms.Normalize("sped")], "names 'sped', which is not in the batch"),
    (transforms.RandomCrop("image", size=9), r"images of \[8, 6\] pixels; expected at least \[9, 9\]"),
    (transforms.RandomCrop("index", size=1), r"shape \[5\]; expected \[B, ..., H, W\]"),
]


@pytest.mark.parametrize(("transform", "message"), WRONG_CALLS)
def test_wrong_transforms_are_refused_at_the_first_batch(transform: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        dataset(make_table(), transform).sample()


WRONG_OPTIONS: list[tuple[Any, str]] = [
    (lambda: transforms.ToDtype(), "expected one name or more"),
    (lambda: transforms.ToDtype("x", dtype=torch.int8, scale=True), "of floating point to scale"),
    (lambda: transforms.Normalize("x", clip=0.0), "clip above 0"),
    (lambda: transforms.Normalize("x", eps=math.nan), "eps of at least 0"),
    (lambda: transforms.RandomCrop("x", size=(1, 2, 3)), "size is"),
    (lambda: transforms.RandomCrop("x", dims=(-1, -2)), "dims is"),
    (lambda: transforms.RandomShift("x", pad=0), "pad is 0"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_OPTIONS)
def test_wrong_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make()


def test_states_of_other_transforms_are_refused() -> None:
    table = make_table()
    plain, moving = dataset(table, None), dataset(table, transforms.Normalize("speed"))
    for one, other in ((plain, moving), (moving, plain)):
        one.sample()
        with pytest.raises(SchemaError, match="Make the dataset with the transforms"):
            other.load_state_dict(one.state_dict())
    moving.sample()
    normalize = transforms.Normalize("speed")
    with pytest.raises(SchemaError, match="expected that of a Normalize"):
        normalize.load_state_dict({"mean": 0})


def test_evaluation_uses_the_statistics_and_draws_nothing() -> None:
    pytest.importorskip("lightning")
    table = make_table(trajectories=12)
    normalize = transforms.Normalize("speed")
    module = gear.ReplayDataModule(
        table, batch_size=4, windows=gear.Window(1), val_fraction=0.3, device="cpu",
        transform=[transforms.RandomShift("image", pad=3), normalize],
    )  # fmt: skip
    module.setup("fit")
    next(iter(module.train_dataloader()))
    before = normalize.state_dict()
    (loader,) = module.val_dataloader()
    plain = gear.ReplayDataModule(table, batch_size=4, windows=gear.Window(1), val_fraction=0.3, device="cpu")
    plain.setup("fit")
    for one, other in zip(loader, plain.val_dataloader()[0], strict=True):
        assert torch.equal(one["image"], other["image"])
        assert normalize.mean is not None
        assert normalize.variance is not None
        torch.testing.assert_close(
            one["speed"].double(),
            (other["speed"] - normalize.mean) / normalize.variance.sqrt(),
            atol=1e-5,
            rtol=1e-4,
        )
    assert equal(normalize.state_dict(), before)

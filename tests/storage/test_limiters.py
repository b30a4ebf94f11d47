"""Rate limiters: the rules against a naive twin, who can block whom, their storage and their messages."""

from __future__ import annotations

import collections
import itertools
import json
import math
import pickle
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from cases import mostly_long

from gear_loader.errors import SchemaError
from gear_loader.storage.limiters import MinSize, Queue, RateLimiter, SampleToInsertRatio
from gear_loader.utils.arrays import shown

Bound = Fraction | float

LIMITERS = (
    *(MinSize(1), MinSize(1000), Queue(1), Queue(7), RateLimiter(1.5, 3, -2, 4)),
    *(SampleToInsertRatio(4, 100, 50), SampleToInsertRatio(0.1, 3, 2), SampleToInsertRatio(1 / 3, 3, (0, 5))),
    *(SampleToInsertRatio(1.2345678, 1000, 10), SampleToInsertRatio(2.5, 10, (-math.inf, 30))),
    *(SampleToInsertRatio(2.5, 10, (20, math.inf)), SampleToInsertRatio(2.5, 10, math.inf)),
)


class Twin:
    """The rules word for word: one trajectory, one row after another."""

    def __init__(self, ratio: Fraction, min_size: int, low: Bound, high: Bound) -> None:
        self.ratio, self.min_size, self.low, self.high = ratio, min_size, low, high

    def may_insert(self, count: int, *, size: int, inserted: int, sampled: int) -> bool:
        for _ in range(count):
            free = size + 1 <= self.min_size
            if not free and not (inserted + 1) * self.ratio - sampled <= self.high:
                return False
            size, inserted = size + 1, inserted + 1
        return True

    def may_sample(self, count: int, *, size: int, inserted: int, sampled: int) -> bool:
        for _ in range(count):
            if size < self.min_size or not inserted * self.ratio - (sampled + 1) >= self.low:
                return False
            sampled += 1
        return True


def refuses(check: Callable[..., object], *given: Any, **options: Any) -> bool:
    try:
        check(*given, **options)
    except SchemaError:
        return True
    return False


# ---------------------------------------------------------------- the rules

RATIOS = st.builds(Fraction, st.integers(1, 60), st.integers(1, 60))


@st.composite
def limits(draw: st.DrawFn) -> tuple[RateLimiter, Twin]:
    ratio, min_size = draw(RATIOS), draw(st.integers(1, 20))
    low: Bound = draw(
        st.one_of(st.just(-math.inf), st.builds(Fraction, st.integers(-99, 99), st.integers(1, 9)))
    )
    above = draw(st.one_of(st.just(math.inf), st.builds(Fraction, st.integers(0, 99), st.integers(1, 9))))
    high = 1 + ratio + above + (0 if math.isinf(low) else low)
    return RateLimiter(float(ratio), min_size, float(low), float(high)), Twin(ratio, min_size, low, high)


@hypothesis.given(
    limits=limits(),
    count=st.integers(1, 12),
    size=st.integers(0, 30),
    inserted=st.one_of(st.integers(0, 200), st.integers(10**12 - 100, 10**12)),
    offset=st.integers(-120, 120),
)
def test_the_rules_are_those_of_the_naive_twin(
    limits: tuple[RateLimiter, Twin], count: int, size: int, inserted: int, offset: int
) -> None:
    limiter, twin = limits
    counts = {"size": size, "inserted": inserted, "sampled": max(int(inserted * twin.ratio) + offset, 0)}
    assert limiter.may_insert(count, **counts) is twin.may_insert(count, **counts)
    assert limiter.may_sample(count, **counts) is twin.may_sample(count, **counts)


@pytest.mark.parametrize(
    ("ratio", "added", "rows"), [(0.1, 10, 1), (0.1, 30, 3), (1 / 3, 3, 1), (1.2345678, 5_000_000, 6_172_839)]
)
@pytest.mark.parametrize("rounds", [1, 10**5, 10**12])
def test_nothing_is_rounded_however_large_the_counts(
    ratio: float, added: int, rows: int, rounds: int
) -> None:
    # In floats 3 * 0.1 > 0.3, and 0.1 * 10**13 has a spacing of 1.2e-4.
    limiter = RateLimiter(ratio, 1, 0, rows)
    counts = {"size": 9, "inserted": added * rounds, "sampled": rows * rounds}  # the balance is 0
    assert not limiter.may_sample(1, **counts)
    assert limiter.may_insert(added, **counts)
    assert not limiter.may_insert(added + 1, **counts)
    counts["inserted"] += added
    assert limiter.may_sample(rows, **counts)
    assert not limiter.may_sample(rows + 1, **counts)
    assert not limiter.may_insert(1, **counts)


def test_the_bounds_of_each_kind() -> None:
    for size in range(6):
        counts = {"size": size, "inserted": 10, "sampled": 10**9}
        assert MinSize(3).may_sample(10**6, **counts) is (size >= 3)
        assert MinSize(3).may_insert(10**6, **counts)
    # A number is centred on the balance at which sampling begins, a pair is not.
    assert (SampleToInsertRatio(4, 100, 50).min_diff, SampleToInsertRatio(4, 100, 50).max_diff) == (350, 450)
    pair = SampleToInsertRatio(4, 100, (-7, 450.5))
    assert (pair.min_diff, pair.max_diff) == (-7, 450.5)
    assert SampleToInsertRatio(4, 100, (350, 450)) == SampleToInsertRatio(4, 100, 50)
    assert SampleToInsertRatio(ratio=0.1, min_size=3, error_buffer=2).min_diff == -1.7
    limiter = SampleToInsertRatio(1, 3, 2)  # balances from 1 to 5; below min_size adding is free again
    for count, size, may in ((1, 5, False), (1, 3, False), (1, 2, True), (3, 0, True), (4, 0, False)):
        assert limiter.may_insert(count, size=size, inserted=5, sampled=0) is may


def test_a_queue_gives_each_trajectory_once_and_never_holds_more_than_its_size() -> None:
    for size, held, rows, added in itertools.product((1, 3, 8), (0, 1, 3, 8), (1, 2, 3), (1, 2, 3)):
        counts = {"size": held, "inserted": 100 + held, "sampled": 100}
        assert Queue(size).may_insert(added, **counts) is (held + added <= size)
        assert Queue(size).may_sample(rows, **counts) is (held >= rows)
        assert refuses(Queue(size).check_insert, added, batch=rows) is (size < rows + added - 1)


# ---------------------------------------------------------------- who could block whom for ever


def standstill(twin: Twin, count: int, batch: int, *, removals: bool) -> bool:
    """Whether any order of inserts (1, `count`), samples (1, `batch`) and removals leads to one; all are tried.

    What counts is the size up to min_size, and the balance. Removals let balances grow without end: not followed far.
    """
    ceiling = max(twin.high, twin.low + batch, twin.min_size * twin.ratio) + 2 * twin.ratio
    todo, seen = [(0, 0, 0)], {(0, Fraction(0))}
    while todo:
        size, inserted, sampled = todo.pop()
        counts = {"size": size, "inserted": inserted, "sampled": sampled}
        if not twin.may_insert(count, **counts) and not twin.may_sample(batch, **counts):
            return True
        following = [(max(size - 1, 0), inserted, sampled)] if removals else []
        following += [(size + n, inserted + n, sampled) for n in (1, count) if twin.may_insert(n, **counts)]
        following += [(size, inserted, sampled + n) for n in (1, batch) if twin.may_sample(n, **counts)]
        for size, inserted, sampled in following:
            size = min(size, twin.min_size)
            state = size, inserted * twin.ratio - sampled
            if state not in seen and state[1] <= ceiling:
                seen.add(state)
                todo.append((size, inserted, sampled))
    return False


def small_limits(min_size: int) -> Iterator[tuple[Fraction, int, Fraction, Fraction]]:
    third, half = Fraction(1, 3), Fraction(1, 2)
    for ratio in (third, half, 2 * third, Fraction(1), 3 * half, Fraction(2), 7 * third):
        for low in (Fraction(-2), -third, Fraction(0), half, Fraction(2)):
            widths = (
                half,
                Fraction(1),
                1 + ratio - third,
                1 + ratio,
                3 * half + ratio,
                4 * third + 2 * ratio,
            )
            yield from ((ratio, min_size, low, low + width) for width in widths)


@pytest.mark.parametrize("min_size", mostly_long([1, 2, 4], 2))
def test_the_checks_refuse_exactly_what_can_come_to_a_standstill(min_size: int) -> None:
    seen = collections.Counter[bool]()
    for ratio, _, low, high in small_limits(min_size):
        twin = Twin(ratio, min_size, low, high)
        try:
            limiter = RateLimiter(float(ratio), min_size, float(low), float(high))
        except SchemaError:
            assert standstill(twin, 1, 1, removals=False)
            continue
        for batch, count in itertools.product((1, 2, 3), repeat=2):
            stuck = standstill(twin, count, batch, removals=False)
            note = f"{limiter}, {count} added at once, batches of {batch}"
            assert refuses(limiter.check_insert, count, batch=batch) is stuck, note
            batch_refused = refuses(limiter.check_batch, batch, added=count)
            assert stuck or not batch_refused, note
            if count == 1:
                assert batch_refused is stuck, note
                assert standstill(twin, 1, batch, removals=True) is stuck, note
            seen[stuck] += 1
    assert min(seen[True], seen[False]) > 100


def test_pairs_that_block_each_other_although_each_alone_is_safe() -> None:
    limiter = SampleToInsertRatio(4, 100, 50)
    limiter.check_batch(97)
    with pytest.raises(SchemaError, match="at most 97 rows"):
        limiter.check_batch(98)
    queue = Queue(5)
    queue.check_batch(3)
    queue.check_insert(5)
    with pytest.raises(SchemaError, match="at most 1 row at once"):
        queue.check_batch(3, added=5)
    with pytest.raises(SchemaError, match="at most 3 at once"):
        queue.check_insert(5, batch=3)
    with pytest.raises(SchemaError, match=r"Adding 6 trajectories at once, no batch is safe\. Add fewer a"):
        queue.check_batch(1, added=6)
    with pytest.raises(SchemaError, match=r"With batches of 6 rows, not even one is safe\. Draw smaller b"):
        queue.check_insert(1, batch=6)


def test_without_bounds_everything_is_safe() -> None:
    for limiter in (
        MinSize(5),
        SampleToInsertRatio(2, 5, math.inf),
        SampleToInsertRatio(2, 5, (3, math.inf)),
    ):
        limiter.check_batch(10**9)
        limiter.check_insert(10**9, batch=10**9)
    limiter = SampleToInsertRatio(2, 5, (-math.inf, 20))
    limiter.check_batch(10**9, added=10**9)
    with pytest.raises(SchemaError, match="at most 6 at once"):
        limiter.check_insert(7)


@pytest.mark.parametrize("limiter", LIMITERS, ids=repr)
def test_the_remedies_help(limiter: RateLimiter) -> None:
    def number(message: str, before: str) -> float:
        return float(message.partition(before)[2].split()[0].rstrip("."))

    for count, batch in [(1, 200), (30, 1), (7, 64)]:
        try:
            limiter.check_insert(count, batch=batch)
        except SchemaError as error:
            message = str(error)
            if "Add at most" in message:
                limiter.check_insert(int(number(message, "Add at most ")), batch=batch)
            if isinstance(limiter, Queue):
                wider: RateLimiter = Queue(int(number(message, "a size of at least ")))
            elif isinstance(limiter, SampleToInsertRatio):
                buffer = number(message, "an error_buffer of at least ")
                wider = SampleToInsertRatio(limiter.samples_per_insert, limiter.min_size, buffer)
            else:
                apart = number(message, "min_diff and max_diff at least ")
                high = limiter.min_diff + apart
                if "max_diff at least" in message.partition("apart")[2]:
                    high = max(high, number(message.partition("apart")[2], "max_diff at least "))
                wider = RateLimiter(limiter.samples_per_insert, limiter.min_size, limiter.min_diff, high)
            wider.check_insert(count, batch=batch)
            wider.check_batch(batch, added=count)


@pytest.mark.parametrize("limiter", LIMITERS, ids=repr)
def test_repr_equality_hash_pickle_and_json(limiter: RateLimiter) -> None:
    kinds: dict[str, Any] = {
        kind.__name__: kind for kind in (MinSize, Queue, RateLimiter, SampleToInsertRatio)
    }
    text = json.dumps(limiter.to_json(), allow_nan=False)
    copies = [eval(repr(limiter), {**kinds, "inf": math.inf}), pickle.loads(pickle.dumps(limiter))]
    copies += [kind.from_json(json.loads(text)) for kind in (RateLimiter, type(limiter))]
    for copy in copies:
        assert type(copy) is type(limiter)
        assert (copy, hash(copy), repr(copy)) == (limiter, hash(limiter), repr(limiter))
        assert vars(copy) == vars(limiter)
    assert sum(limiter == other for other in LIMITERS) == 1
    with pytest.raises(AttributeError, match="min_size"):
        limiter.min_size = 4  # type: ignore[misc]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Leaky"}, "is of kind 'Leaky'; expected one of .*'Queue'"),
        ({"kind": ["Queue"]}, r"is of kind \['Queue'\]"),
        ({"samples_per_insert": 2.0}, "no Queue has these values"),
        ({"min_diff": None}, "no Queue has these values"),
        ({"max_diff": None}, "no Queue has these values"),
        ({"max_diff": 4.5}, "no Queue has these values"),
        ({"kind": "MinSize"}, "no MinSize has these values"),
        ({"samples_per_insert": "4"}, "samples_per_insert is '4'; expected a finite number above 0"),
        ({"min_size": 1.0}, "min_size is 1.0; expected an integer of at least 1"),
        ({"max_diff": math.nan}, "max_diff is nan; expected a number, or inf for no bound"),
        ({"max_diff": 0}, "between them there is no room"),
        ({"more": 1}, r"expected a mapping of \['kind', 'samples_per_insert', 'min_size', 'min_diff', 'ma"),
    ],
)
def test_damaged_json_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        RateLimiter.from_json({**Queue(4).to_json(), **change})
    with pytest.raises(SchemaError, match=r"is of kind 'Queue'; expected one of \['MinSize'\]"):
        MinSize.from_json(Queue(4).to_json())
    for wrong in (None, [], "Queue", {}, {"kind": "Queue", "size": 4}):
        with pytest.raises(SchemaError, match=r"expected a mapping of \['kind'"):
            RateLimiter.from_json(wrong)


def test_counts_are_integers_of_at_least_one() -> None:
    cases: list[tuple[str, Callable[[Any], object], Any]] = [
        *(("min_size", MinSize, value) for value in (True, 0, -3, 2.0, math.nan, "4", None, [4])),
        ("size", Queue, 0),
        ("min_size", lambda value: SampleToInsertRatio(4, value, 50), 0),
        ("min_size", lambda value: RateLimiter(1, value, 0, 50), 0),
        ("The number of rows of a batch", Queue(3).check_batch, 0),
        ("The number of trajectories to add", Queue(3).check_insert, 0),
        ("added", lambda value: Queue(3).check_batch(1, added=value), 0),
        ("batch", lambda value: Queue(3).check_insert(1, batch=value), 0),
    ]
    for name, make, value in cases:
        with pytest.raises(SchemaError) as caught:
            make(value)
        assert str(caught.value) == f"{name} is {value!r}; expected an integer of at least 1."


def test_the_smallest_buffers_are_accepted() -> None:
    # Decimals whose floats would not add up to what they say.
    for ratio, min_size in ((4.0, 10), (0.1, 3), (1.1, 7), (1 / 3, 10), (2.3, 123456789)):
        SampleToInsertRatio(ratio, min_size, max(1.0, ratio)).check_batch(1)
    assert SampleToInsertRatio(4, 10, (40, 48)).may_sample(1, size=11, inserted=11, sampled=0)
    assert SampleToInsertRatio(np.float32(0.5), np.int64(3), np.float64(2)) == SampleToInsertRatio(0.5, 3, 2)
    assert SampleToInsertRatio(Fraction(1, 3), 3, Fraction(2)) == SampleToInsertRatio(1 / 3, 3, 2)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=r"at most 1 at once, or set .* at least more than 1e308 apart"):
        RateLimiter(1e300, 1, 0, 1.5e300).check_insert(10**9)
    for ratio in (1e-300, 1e300):
        assert SampleToInsertRatio(ratio, 3, (0, 1e301)).may_insert(1, size=0, inserted=0, sampled=0)
    limiter = RateLimiter(1.2345678, 1, 0, 10)  # 6172839 / 5000000: 10**13 times that is beyond int64
    counts = {"size": np.int64(5), "inserted": np.int64(10**13), "sampled": np.int64(12345678000000)}
    assert limiter.may_insert(np.int64(8), **counts)  # type: ignore[arg-type]
    assert not limiter.may_insert(9, **counts)
    assert not limiter.may_sample(1, **counts)
    assert "inserted * 1.2345678 - sampled = 0, allowed" in limiter.explain("sample", 1, **counts)


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("what", "count", "counts", "message"),
    [
        ("sample", 32, (88, 88, 0), "did not let 32 rows be sampled: it waits for 12 more trajectories to"),
        ("sample", 60, (105, 108, 30), "did not let 60 rows be sampled: it waits for 2 more trajectories "),
        ("sample", 200, (112, 112, 0), "smaller batches, or give it an error_buffer of at least 102. Coun"),
        ("insert", 1, (112, 112, 0), "did not let 1 trajectory be added: it waits for 2 more rows to be s"),
        ("insert", 1, (112, 112, 1), "it waits for 1 more row to be sampled. "),
        ("insert", 3, (98, 112, 0), "it waits for 10 more rows to be sampled, but nothing is sampled belo"),
        ("insert", 3, (98, 98, 0), "did not let 3 trajectories be added: it would let it now. Try again, "),
        ("sample", 1, (100, 100, 0), "did not let 1 row be sampled: it would let it now. Try again, with "),
    ],
)
def test_what_was_waited_for(what: Any, count: int, counts: tuple[int, int, int], message: str) -> None:
    limiter = SampleToInsertRatio(4, 100, 50)
    size, inserted, sampled = counts
    said = limiter.explain(what, count, size=size, inserted=inserted, sampled=sampled)
    assert said.startswith("SampleToInsertRatio(ratio=4.0, min_size=100, error_buffer=50.0) did not let ")
    assert message in said


@hypothesis.given(
    limits=limits(),
    count=st.integers(1, 12),
    size=st.integers(0, 30),
    inserted=st.integers(0, 200),
    offset=st.integers(-60, 60),
)
def test_what_was_waited_for_is_exactly_enough(
    limits: tuple[RateLimiter, Twin], count: int, size: int, inserted: int, offset: int
) -> None:
    limiter, twin = limits
    counts = {"size": size, "inserted": inserted, "sampled": max(int(inserted * twin.ratio) + offset, 0)}
    for what in ("sample", "insert"):
        said = limiter.explain(what, count, **counts)  # type: ignore[arg-type]
        may = limiter.may_sample if what == "sample" else limiter.may_insert
        assert ("it would let it now" in said) is may(count, **counts)
        if may(count, **counts):
            continue
        more = int(said.partition("it waits for ")[2].split()[0])
        for enough, now in ((False, more - 1), (True, more)):
            if what == "sample":
                later = {**counts, "size": size + now, "inserted": inserted + now}
            else:
                later = {**counts, "sampled": counts["sampled"] + now}
            assert may(count, **later) is enough


def test_numbers_that_are_refused() -> None:
    ratio = SampleToInsertRatio
    makes: list[tuple[Callable[[Any], object], str]] = [
        (lambda bad: ratio(bad, 10, 50), "ratio is {}; expected a finite number above 0"),
        (lambda bad: RateLimiter(bad, 10, 0, 50), "samples_per_insert is {}; expected a finite number abo"),
        (lambda bad: ratio(4, 10, bad), "error_buffer is {}; expected a number"),
        (lambda bad: ratio(4, 10, (bad, 99)), "min_diff of error_buffer is {}; expected a number, or -inf"),
        (lambda bad: ratio(4, 10, (0, bad)), "max_diff of error_buffer is {}; expected a number, or inf"),
        (lambda bad: RateLimiter(1, 10, bad, 9), "min_diff is {}; expected a number, or -inf"),
        (lambda bad: RateLimiter(1, 10, 0, bad), "max_diff is {}; expected a number, or inf"),
    ]
    cases = [
        (make, bad, said.format(shown(bad)))
        for make, said in makes
        for bad in (True, math.nan, "4", None, 1j, 10**400, {})
    ]
    room = "a min_diff and a max_diff at least 8 "
    cases += [
        *(
            (lambda bad: ratio(bad, 10, 50), bad, f"ratio is {bad}; expected a finite")
            for bad in (0, -1.5, math.inf)
        ),
        *(
            (lambda bad: ratio(4, 10, bad), bad, f"error_buffer is {bad}; expected a number of at least 4 ")
            for bad in (-50, -math.inf, 3.9)
        ),
        (lambda bad: ratio(0.25, 10, bad), 0.9, "error_buffer is 0.9; expected a number of at least 1 "),
        *((lambda bad: ratio(4, 10, bad), bad, room) for bad in ((36, 43), (43, 36))),
        (lambda bad: ratio(4, 10, bad), (1, 2, 3), "expected a number or a pair (min_diff, max_diff)"),
        (lambda bad: ratio(4, 10, bad), (41, 99), "with a min_diff above min_size * ratio = 40, nothing c"),
        (lambda bad: ratio(bad, 10**9, 1e308), 1e308, "too large with ratio 1e+308 and min_size 1000000000"),
        (lambda bad: ratio(4, 10, bad), (math.inf, math.inf), "min_diff of error_buffer is inf; expected "),
        (Queue, 10**400, "expected an integer of at least 1 and at most 2**62"),
        (lambda bad: RateLimiter(1, 1, 0, bad), -math.inf, "max_diff is -inf; expected a number, or inf f"),
        (lambda bad: RateLimiter(1, 1, 0, bad), 0.5, "min_diff is 0.0 and max_diff is 0.5; between them t"),
    ]
    for make, bad, message in cases:
        with pytest.raises(SchemaError) as caught:
            make(bad)
        assert message in str(caught.value)

"""The emulator itself: what it computes, what it counts, and that it finds what a kernel does wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest

from emulation import arithmetic
from emulation.machine import Counts, Machine, SynchronizationError, UnknownInstructionError
from emulation.memory import InvalidAccessError, Memory, RaceError
from emulation.ptx import parse
from emulation.timing import ROUND_TRIPS

OUT = "mul.wide.u32 %rd2, %r0, 4; add.s64 %rd3, %rd0, %rd2;"
"""The address of the thread's int32 of the output."""


def machine(body: str, *, threads: int = 64, shared: int = 512) -> Machine:
    """A kernel of one argument, an address, which is in %rd0; %r0 is the thread."""
    return Machine(
        parse(
            f""".visible .entry tried(
            .param .u64 .ptr .global .align 1 tried_param_0,
            .param .u64 .ptr .global .align 1 tried_param_1,
            .param .u64 .ptr .global .align 1 tried_param_2
            )
            .reqntid {threads}
            {{
            .reg .pred %p<8>;
            .reg .b16 %rs<8>;
            .reg .b32 %r<16>;
            .reg .b64 %rd<16>;
            ld.param.b64 %rd0, [tried_param_0];
            mov.u32 %r0, %tid.x;
            {body}
            ret;
            }}"""
        ),
        shared,
    )


def run(
    body: str, values: Sequence[int] | np.ndarray = (), *, blocks: int = 1, threads: int = 64
) -> np.ndarray:
    """The output after the kernel, int32; `values` before, else zeros for every thread."""
    out = np.array(values, dtype=np.int32) if len(values) else np.zeros(threads, dtype=np.int32)
    launch(machine(body, threads=threads), out, blocks=blocks)
    return out


def launch(tried: Machine, out: np.ndarray, *, blocks: int = 1, host: bool = False) -> Counts:
    memory = Memory()
    memory.add(out.ctypes.data, out.nbytes, "the output", host=host)
    return tried.launch(blocks, [out.ctypes.data], memory)


def test_branches_meet_again() -> None:
    # Odd threads add 5, even ones loop as often as their number.
    body = f"""and.b32 %r1, %r0, 1; setp.eq.s32 %p1, %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, %r0;
    @%p1 bra $even;
    add.s32 %r2, %r2, 5;
    bra.uni $end;
$even:
    add.s32 %r2, %r2, 2; sub.s32 %r3, %r3, 1; setp.gt.s32 %p2, %r3, 0;
    @%p2 bra $even;
$end:
    {OUT} st.global.b32 [ %rd3 + 0 ], {{ %r2 }};"""
    tried, out = machine(body), np.zeros(64, dtype=np.int32)
    counts = launch(tried, out)
    assert out.tolist() == [5 if i % 2 else 2 * max(i, 1) for i in range(64)]
    assert counts.instructions["st.global.b32"] == 2, "both warps, once each"


OPERANDS = [0, 1, 2, 7, -1, -2, -7, 31, 33, 2**31 - 1, -(2**31), 0x12345678, -0x12345678]
UNSIGNED = 1 << 32


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("div.s32", lambda x, y: int(x / y) if y else None),
        ("rem.s32", lambda x, y: x - y * int(x / y) if y else None),
        ("div.u32", lambda x, y: (x % UNSIGNED) // (y % UNSIGNED) if y else None),
        ("shl.b32", lambda x, y: x << (y % UNSIGNED) if y % UNSIGNED < 32 else 0),
        ("shr.u32", lambda x, y: (x % UNSIGNED) >> (y % UNSIGNED) if y % UNSIGNED < 32 else 0),
        ("shr.s32", lambda x, y: x >> min(y % UNSIGNED, 31)),
        ("mul.hi.u32", lambda x, y: ((x % UNSIGNED) * (y % UNSIGNED)) >> 32),
        ("mul.lo.s32", lambda x, y: x * y),
        ("min.u32", lambda x, y: min(x % UNSIGNED, y % UNSIGNED)),
        ("max.s32", max),
        ("min.relu.s32", lambda x, y: max(min(x, y), 0)),
    ],
)
def test_integers(name: str, expected: object) -> None:
    assert callable(expected)
    pairs = [(x, y) for x in OPERANDS for y in OPERANDS if (x, y) != (-(2**31), -1)]
    operation, kinds, _ = arithmetic.operation(tuple(name.split(".")))
    inputs = [
        np.array([pair[i] % UNSIGNED for pair in pairs], dtype=np.uint32).view(arithmetic.TYPES[kind])
        for i, kind in enumerate(kinds)
    ]
    with np.errstate(all="ignore"):
        found = operation(*inputs).view(np.uint32)
    for (x, y), value in zip(pairs, found.tolist(), strict=True):
        wanted = expected(x, y)
        assert wanted is None or wanted % UNSIGNED == value, (name, x, y)


def test_upper_halves_of_products() -> None:
    values = [0, 1, 3, 2**32 - 1, 2**32, 2**61 + 12345, 2**63, 2**64 - 1]
    x, y = np.meshgrid(np.array(values, dtype=np.uint64), np.array(values, dtype=np.uint64))
    found = arithmetic.operation(("mul", "hi", "u64"))[0](x.reshape(-1), y.reshape(-1))
    assert found.tolist() == [a * b >> 64 for b in values for a in values]


def test_parts_of_words() -> None:
    permute, extract = (arithmetic.operation(parts)[0] for parts in (("prmt", "b32"), ("bfe", "u32")))
    x, y = (np.array([word], dtype=np.uint32) for word in (0x33221100, 0x77665544))
    assert hex(permute(x, y, np.array([0x7410], dtype=np.uint32))[0]) == "0x77441100"
    assert hex(permute(y * 0 + 0x80, y, np.array([0x8888], dtype=np.uint32))[0]) == "0xffffffff"
    word = np.array([0xABCD1234], dtype=np.uint32)
    assert hex(extract(word, np.array([8], dtype=np.uint32), np.array([12], dtype=np.uint32))[0]) == "0xd12"


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (2, 1, -1),
        (4, 1, 0),
        (0, 4, -4),
        (8, 8, 0x12),
        (24, 8, -0x55),
        (24, 20, -0x55),
        (40, 3, -1),
        (5, 0, 0),
    ],
)
def test_fields_with_a_sign(first: int, count: int, expected: int) -> None:
    extract = arithmetic.operation(("bfe", "s32"))[0]
    word = np.array([0xAB00120C], dtype=np.uint32).view(np.int32)
    places = (np.array([each], dtype=np.uint32) for each in (first, count))
    assert extract(word, *places).tolist() == [expected]


def test_conversions_to_integers() -> None:
    values = np.array([1.9, -1.9, 3e9, -3e9, np.nan, 2.0**31 - 0.5])
    narrow, wide = (arithmetic.operation(("cvt", "rzi", kind, "f64"))[0] for kind in ("s32", "s64"))
    assert narrow(values).tolist() == [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    assert wide(values[:4]).tolist() == [1, -1, 3_000_000_000, -3_000_000_000]


def test_comparisons_of_what_is_not_a_number() -> None:
    x, y = np.array([np.nan, 1.0]), np.array([1.0, 1.0])
    results = {
        name: arithmetic.operation(("setp", name, "f64"))[0](x, y).tolist()
        for name in ("eq", "ne", "le", "leu", "gtu", "nan")
    }
    assert results == {
        "eq": [False, True],
        "ne": [False, False],
        "le": [False, True],
        "leu": [True, True],
        "gtu": [True, False],
        "nan": [True, False],
    }


def test_a_fused_multiplication_rounds_once() -> None:
    x = np.array([1 + 2.0**-30])
    fused = arithmetic.operation(("fma", "rn", "f64"))[0](x, x, np.array([-1.0 - 2.0**-29]))
    assert fused.tolist() == [2.0**-60]


def test_shuffles_read_from_their_lanes() -> None:
    body = f"shfl.sync.bfly.b32 %r1, %r0, 4, 31, -1; {OUT} st.global.b32 [ %rd3 + 0 ], {{ %r1 }};"
    assert run(body).tolist() == [i ^ 4 for i in range(64)]
    body = f"shfl.sync.up.b32 %r1, %r0, 1, 0, -1; {OUT} st.global.b32 [ %rd3 + 0 ], {{ %r1 }};"
    assert run(body).tolist() == [i if i % 32 == 0 else i - 1 for i in range(64)]


def test_matrices_go_through_shared_memory() -> None:
    # Thread i stores its number; threads 8 m to 8 m + 7 then name the rows of 16 bytes of matrix m.
    body = f"""shl.b32 %r1, %r0, 2; st.shared.b32 [%r1], %r0; bar.sync 0; and.b32 %r2, %r0, 15; shl.b32 %r2, %r2, 4;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r2];
    add.s32 %r8, %r4, %r5; sub.s32 %r8, %r8, %r6; {OUT} st.global.b32 [ %rd3 + 0 ], {{ %r8 }};"""
    # Matrix m has the words 32 m to 32 m + 31 (again from the third on), of which thread i gets the one of its number.
    assert run(body).tolist() == [i % 32 + 32 for i in range(64)]


COPY = "mul.lo.u32 %r1, %r0, 16; mul.wide.u32 %rd2, %r0, 16; add.s64 %rd3, %rd0, %rd2;"
"""%r1 is the thread's 16 bytes of shared memory, %rd3 those of the output."""


def test_asynchronous_copies_are_there_when_they_are_waited_for() -> None:
    # Each thread copies 16 bytes, even ones zeros, and reads what its neighbour copied.
    body = f"""{COPY} and.b32 %r2, %r0, 1; mul.lo.u32 %r2, %r2, 16;
    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd3 + 0 ], 0x10, %r2;
    cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
    xor.b32 %r1, %r1, 16; ld.shared.b32 {{ %r3 }}, [ %r1 + 4 ];
    st.global.b32 [ %rd3 + 0 ], {{ %r3 }};"""
    tried, out = machine(body, shared=1024), np.arange(256, dtype=np.int32)
    launch(tried, out)
    assert out[::4].tolist() == [4 * (i + 1) + 1 if i % 2 == 0 else 0 for i in range(64)]


@pytest.mark.parametrize(
    ("waits", "message"),
    [
        ("cp.async.commit_group; bar.sync 0;", "has not been waited for"),
        ("cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;", "has not been waited for"),
        ("cp.async.commit_group; cp.async.wait_group 0;", "was read by warp"),
    ],
)
def test_a_copy_that_is_read_too_early_is_an_error(waits: str, message: str) -> None:
    copy = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd3 + 0 ], 0x10;"
    tried = machine(
        f"{COPY} {copy} {waits} xor.b32 %r1, %r1, 512; ld.shared.b32 {{ %r3 }}, [ %r1 + 0 ];", shared=1024
    )
    with pytest.raises(RaceError, match=message):
        launch(tried, np.arange(256, dtype=np.int32))


@pytest.mark.parametrize(
    ("body", "trips"),
    [
        (
            "ld.global.b32 { %r1 }, [ %rd0 + 0 ]; ld.global.b32 { %r2 }, [ %rd0 + 128 ]; add.s32 %r3, %r1, %r2;",
            1,
        ),
        (
            "ld.global.b32 { %r1 }, [ %rd0 + 0 ]; add.s32 %r3, %r1, 1; ld.global.b32 { %r2 }, [ %rd0 + 128 ];",
            1,
        ),
        (
            "ld.global.b32 { %r1 }, [ %rd0 + 0 ]; add.s32 %r3, %r1, 1; ld.global.b32 { %r2 }, [ %rd0 + 128 ];"
            "add.s32 %r3, %r2, 1;",
            2,
        ),
        ("ld.global.b32 { %r1 }, [ %rd0 + 0 ]; mov.b32 %r3, %r1; ld.global.b32 { %r2 }, [ %rd0 + 128 ];", 0),
        (
            "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd0 + 0 ], 0x10; cp.async.commit_group;"
            "cp.async.cg.shared.global [ %r1 + 16 ], [ %rd0 + 128 ], 0x10; cp.async.commit_group;"
            "cp.async.wait_group 1; cp.async.wait_group 0;",
            1,
        ),
    ],
)
def test_waits_for_memory_are_counted(body: str, trips: int) -> None:
    """One wait for loads that are issued together; a copy of a register waits for nothing."""
    out = np.zeros(64, dtype=np.int32)
    memory = Memory()
    memory.add(out.ctypes.data, out.nbytes, "the output")
    tried = machine(f"mov.b32 %r1, 0; {body}", threads=32)
    assert tried.launch(1, [out.ctypes.data], memory, latencies=ROUND_TRIPS).time == trips


def test_numbers_in_the_text() -> None:
    assert arithmetic.constant("0f3F800000") == struct.unpack("<I", struct.pack("<f", 1.0))[0]
    assert [arithmetic.constant(text) for text in ("-1", "0x7632U")] == [-1, 0x7632]


# ---------------------------------------------------------------- what a kernel does wrong


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(UnknownInstructionError, match=r"tried: ex2\.approx\.f32 .*line 14"):
        machine("ex2.approx.f32 %r1, %r0;")
    with pytest.raises(UnknownInstructionError, match=r"cp\.async"):
        machine("cp.async.bulk.shared.global [ %r0 + 0 ], [ %rd0 + 0 ], 16;")
    with pytest.raises(UnknownInstructionError, match=r"mad\.hi\.s32"):
        machine("mad.hi.s32 %r1, %r0, %r0, %r0;")


@pytest.mark.parametrize(
    ("offset", "message"),
    [(4, "bytes at .* are in no buffer; the one below is the output"), (2, "not a multiple of 4")],
)
@pytest.mark.parametrize(
    "access", ["st.global.b32 [ %rd3 + {} ], {{ %r0 }};", "ld.global.b32 {{ %r1 }}, [ %rd3 + {} ];"]
)
def test_an_access_outside_or_not_aligned_is_an_error(access: str, offset: int, message: str) -> None:
    with pytest.raises(InvalidAccessError, match=message):
        run(OUT + access.format(offset))


def test_shared_memory_ends() -> None:
    with pytest.raises(InvalidAccessError, match="512 of shared memory"):
        run("shl.b32 %r1, %r0, 4; st.shared.b32 [%r1], %r0;")


EXCHANGE = """shl.b32 %r1, %r0, 2; st.shared.b32 [%r1], %r0; {barrier}
xor.b32 %r2, %r1, {distance}; ld.shared.b32 %r3, [%r2]; """


def test_warps_that_exchange_need_a_barrier() -> None:
    out = OUT + "st.global.b32 [ %rd3 + 0 ], { %r3 };"
    with pytest.raises(RaceError, match=r"shared memory was read by warp [01].*written by warp [01]"):
        run(EXCHANGE.format(barrier="", distance=128) + out)
    apart = run(EXCHANGE.format(barrier="bar.sync 0;", distance=128) + out)
    assert apart.tolist() == [i ^ 32 for i in range(64)]
    # Within a warp, where all threads go together, nothing is needed.
    assert run(EXCHANGE.format(barrier="", distance=4) + out).tolist() == [i ^ 1 for i in range(64)]


def test_writes_of_several_warps_are_a_race_unless_equal() -> None:
    run("mov.b32 %r1, 3; st.global.b32 [ %rd0 + 0 ], { %r1 };")
    with pytest.raises(RaceError, match=r"written by warp 0.*written by warp 1"):
        run("shr.u32 %r1, %r0, 5; st.global.b32 [ %rd0 + 0 ], { %r1 };")


def test_blocks_that_write_the_same_byte_are_a_race() -> None:
    with pytest.raises(RaceError, match="written by two blocks"):
        run("st.global.b32 [ %rd0 + 0 ], { %r0 };", threads=1, blocks=2)
    with pytest.raises(RaceError, match="written by one block and read by another"):
        run(
            "mov.u32 %r2, %ctaid.x; setp.eq.s32 %p1, %r2, 0; ld.global.b32 { %r1 }, [ %rd0 + 0 ];"
            "@%p1 st.global.b32 [ %rd0 + 0 ], { %r1 };",
            threads=1,
            blocks=2,
        )
    added = run("mov.b64 %rd1, 1; atom.global.gpu.acq_rel.add.u64 %rd2, [ %rd0 + 0 ], %rd1;", blocks=3)
    assert added[0] == 3 * 64


def test_a_shuffle_without_its_lanes_is_an_error() -> None:
    body = "setp.lt.s32 %p1, %r0, 16; @%p1 shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;"
    with pytest.raises(
        SynchronizationError, match="lanes 0xffff of warp 0 execute it, which names 0xffffffff"
    ):
        run(body)


def test_barriers_that_differ_are_an_error() -> None:
    body = """setp.lt.s32 %p1, %r0, 32;
    @%p1 bra $low;
    bar.sync 0;
    bra.uni $end;
$low:
    bar.sync 0;
$end:
    mov.b32 %r1, 0;"""
    with pytest.raises(SynchronizationError, match="different barriers"):
        run(body)


@pytest.mark.parametrize(
    ("stride", "requests"),
    [(4, {128: 2}), (8, {128: 4}), (32, {128: 16}), (128, {32: 64})],
)
def test_requests_are_counted_by_line_and_sector(stride: int, requests: dict[int, int]) -> None:
    tried = machine(
        f"mul.wide.u32 %rd2, %r0, {stride}; add.s64 %rd3, %rd0, %rd2; ld.global.b32 {{ %r1 }}, [ %rd3 + 0 ];"
    )
    memory = np.zeros(64 * stride // 4 + 64, dtype=np.int32)
    aligned = memory[-memory.ctypes.data % 128 // 4 :]
    counts = launch(tried, aligned, host=True)
    assert counts.host_requests == requests
    assert counts.host_bytes == sum(size * count for size, count in requests.items())
    assert launch(tried, aligned, host=False).host_requests == {}

"""The small parts of all messages, declared field by field: packing, parsing, sizes and bounds follow from that.

Fields lie one after another, little-endian and without padding; a text is u16 bytes, UTF-8. `slots=i64["n"]` stands for
n numbers, `generations=i64["n"].where("known")` for n numbers if the bit `known` of the flags is set, and nothing
otherwise; `u32.to("rows")` is at most the server's limit of this name. Such an n, and such a flag, are not given: they
follow from the values, of which None is left out. The bulk part, which follows the small part, is described with each
message.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np

from gear_loader.transport.message_schema import MAX_COLUMNS, MAX_SPEC_BYTES
from gear_loader.transport.wire import MAX_TEXT, NONCE, Fields, Kind, Limits, ProtocolError, pack_text

_PROOF = 32  # bytes of an HMAC
_MOST_NAMES = 64  # names of columns with the longest text that fit into a message


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a message.

    Attributes:
        code: numpy's dtype of a number; "text"; "bytes"; or "rest", all bytes up to the end.
        most: largest number, or most bytes of the others, whose number of "bytes" it is; or a limit of the server.
        count: name of the field before, that says how many there are; "" for one.
        flag: name of the flag without which the field is left out; "" for none.
        flags: of an integer: names of its bits, the lowest first; each is a value of its own.
    """

    code: str
    most: int | str = 0
    count: str = ""
    flag: str = ""
    flags: tuple[str, ...] = ()

    def __getitem__(self, count: str) -> Field:
        return dataclasses.replace(self, count=count)

    def to(self, most: int | str) -> Field:
        """The same with numbers of at most `most`, which may be the name of a limit."""
        return dataclasses.replace(self, most=most)

    def where(self, flag: str) -> Field:
        """The same, left out unless a flag is set."""
        return dataclasses.replace(self, flag=flag)

    def limit(self, limits: Limits | None) -> int:
        """`most` as a number; 0 for none."""
        return getattr(limits or Limits(), self.most) if isinstance(self.most, str) else self.most

    def pack(self, value: Any) -> bytes:
        """Serialize a value."""
        if self.count:
            if self.code == "text":
                return b"".join(pack_text(each, self.limit(None)) for each in value)
            return value.astype(self.code).tobytes()  # type: ignore[no-any-return]
        if self.code == "text":
            return pack_text(value, self.limit(None))
        if self.code in ("bytes", "rest"):
            return bytes(value)
        return int(value).to_bytes(np.dtype(self.code).itemsize, "little", signed=self.code[1] == "i")

    def read(self, fields: Fields, name: str, count: int | None, limits: Limits | None) -> Any:
        """Read and check a value."""
        if count is not None:
            if self.code == "text":
                return tuple(fields.text(name, self.limit(limits)) for _ in range(count))
            return fields.array(count, self.code, name).astype(self.code[1:])  # aligned
        if self.code == "text":
            return fields.text(name, self.limit(limits))
        if self.code == "bytes":
            return fields.raw(self.limit(limits), name)
        if self.code == "rest":
            return fields.rest()
        value = int.from_bytes(
            fields.raw(np.dtype(self.code).itemsize, name), "little", signed=self.code[1] == "i"
        )
        most = (1 << len(self.flags)) - 1 if self.flags else self.limit(limits)
        if (most and value > most) or (self.code[1] == "i" and value < 0):
            raise ProtocolError(
                f"{name} of a message {fields.what} is {value:,}; expected at most {most:,}, and no number below 0."
            )
        return value

    def largest(self, limits: Limits | None, count: int) -> int:
        """Most bytes that the field takes."""
        if self.code == "text":
            return count * (2 + self.limit(limits))
        return self.limit(limits) if self.code in ("bytes", "rest") else count * np.dtype(self.code).itemsize


class WireMessage:
    """The small part of one kind of message.

    Args:
        kind: of the message. fields: name -> field, in their order.

    Attributes:
        fields: as given.
    """

    def __init__(self, kind: Kind, **fields: Field) -> None:
        self.kind = kind
        self.fields = fields
        given = list(fields.values())
        self._implied = {each.count for each in given} | {each.flag for each in given}

    def pack(self, **values: Any) -> bytes:
        """Serialize values by their names; flags are booleans."""
        for name, field in self.fields.items():
            if field.flag:
                values[field.flag] = values[name] is not None
            if field.count and values[name] is not None:
                values[field.count] = len(values[name])
        packed = []
        for name, field in self.fields.items():
            if field.flags:
                packed.append(field.pack(sum(bool(values[flag]) << i for i, flag in enumerate(field.flags))))
            elif not field.flag or values[field.flag]:
                packed.append(field.pack(values[name]))
        return b"".join(packed)

    def parse(self, small: Any, limits: Limits | None = None) -> Any:
        """Parse a small part from an untrusted source.

        Returns:
            An object with the values by their names; None for those that are left out; flags are booleans.

        Raises:
            ProtocolError: a missing or invalid field, whose name the message has.
        """
        fields = Fields(small, self.kind.name)
        found: dict[str, Any] = {}
        for name, field in self.fields.items():
            if field.flag and not found[field.flag]:
                found[name] = None
                continue
            value = field.read(fields, name, found[field.count] if field.count else None, limits)
            found |= {flag: bool(value >> i & 1) for i, flag in enumerate(field.flags)} or {name: value}
        fields.end()
        return types.SimpleNamespace(**{n: value for n, value in found.items() if n not in self._implied})

    def most(self, limits: Limits | None = None) -> int:
        """Largest size of the small part."""
        total = 0
        for field in self.fields.values():
            count = self.fields[field.count].limit(limits) if field.count else 1
            total += field.largest(limits, min(count, _MOST_NAMES) if field.code == "text" else count)
        return total


# ---------------------------------------------------------------- the messages

u32, u64 = Field("<u4"), Field("<u8")
i64, f32 = Field("<i8"), Field("<f4")
_name = Field("text", 128)
_library = Field("text", 64)
_json = Field("rest", MAX_SPEC_BYTES)


def _flags(*names: str) -> Field:
    return Field("<u4", flags=names)


HELLO, CHALLENGE = (
    WireMessage(kind, library=_library, carrier=_library, nonce=Field("bytes", NONCE))
    for kind in (Kind.HELLO, Kind.CHALLENGE)
)
PROOF = WireMessage(Kind.PROOF, proof=Field("bytes", _PROOF))
WELCOME = WireMessage(
    Kind.WELCOME, proof=Field("bytes", _PROOF), rows=u64, reply_bytes=u64, store_bytes=u64, specs=u64
)

OPEN = WireMessage(Kind.OPEN, number=u32, spec=_json)
"""A `WindowSpec`, `PackedSpec` or `ValueSpec`; replaces that of the same number."""
OPENED = WireMessage(Kind.OPENED, number=u32)
FETCH = WireMessage(Kind.FETCH, number=u32, n=u32.to("rows"), rows=Field("rest"))
"""Rows: slots, anchors and generations; of a `PackedSpec` slots, first steps, generations and numbers of steps; of a
`ValueSpec` slots, first rows, generations, numbers of rows, and both words of records; each int64 [n]. REPLY has a bulk
part only, as the spec lays it out."""

STORE = WireMessage(
    Kind.STORE,
    n=u32.to("rows"),
    flags=_flags("has_finals", "again", "has_parts", "has_prefixes"),
    lengths=i64["n"],
    ids=i64["n"],
    priorities=f32["n"],
    finals=i64["n"].where("has_finals"),
    wait=u32,
    parts=u32.where("has_parts"),
    before=u64.where("has_parts"),
    prefixes=i64["n"].where("has_prefixes"),
    prefix_steps=i64["n"].where("has_prefixes"),
    prefix_generations=i64["n"].where("has_prefixes"),
    table=_name,
    schema=_json,
)
"""Bulk part: column after column, each from a multiple of 128 bytes on: the steps of one trajectory after another. Then
ragged values, see `ragged_rows`.

again: it is sent again, with the ids of the first time, because its answer did not arrive. parts, before: of the only
trajectory, this many PART messages of the connection have brought this many rows. wait: milliseconds that the server
may wait for free space or the rate limiter. prefixes: slots of what trajectories begin with, -1 for nothing; steps and
generations are -1 throughout if none were given. STORED has the slots, int64 [n]."""
PART = WireMessage(Kind.PART, id=i64.to((1 << 63) - 1), number=u64, rows=u64)
"""The next steps of a trajectory that is stored later; it has no answer. Bulk part: as that of STORE, of the columns
that have steps."""

UPDATE = WireMessage(
    Kind.UPDATE,
    n=u32.to("rows"),
    flags=_flags("known", "strict"),
    slots=i64["n"],
    generations=i64["n"].where("known"),
    priorities=f32["n"],
    table=_name,
)
"""strict: a row of a removed trajectory is an error. UPDATED has the number of such rows, which were skipped."""
FILL = WireMessage(
    Kind.FILL,
    n=u32.to("rows"),
    flags=_flags("strict", "again"),
    identity=u64,
    slots=i64["n"],
    generations=i64["n"],
    lengths=i64["n"],
    table=_name,
    described=_json,
)
"""generations: -1 for any. described: a list of the schema and the names of the filled columns. Bulk part: as that of
STORE, or a value of each trajectory. FILLED is as UPDATED."""
SET = WireMessage(
    Kind.SET,
    n=u32.to("rows"),
    m=u32.to(MAX_COLUMNS),
    flags=_flags("strict", "again", "masked"),
    identity=u64,
    slots=i64["n"],
    anchors=i64["n"],
    generations=i64["n"],
    lengths=i64["m"],
    table=_name,
    described=_json,
)
"""Values of `lengths[i]` steps from each anchor on, for column i of those described, as FILL describes them. Bulk part:
column after column, each from a multiple of 128 bytes on: the steps of one row after another; then, if masked, bool
[n, L]. WRITTEN is as UPDATED."""
UPDATED, FILLED, WRITTEN = (
    WireMessage(kind, stale=u64) for kind in (Kind.UPDATED, Kind.FILLED, Kind.WRITTEN)
)
UNFILLED = WireMessage(Kind.UNFILLED, n=u32.to(MAX_COLUMNS), table=_name, names=Field("text", MAX_TEXT)["n"])
"""DESCRIBED answers it: slots and generations, int64 [2, m]."""

_MOST_VERSION = 1 << 62
ADVANCE = WireMessage(
    Kind.ADVANCE,
    version=u64.to(_MOST_VERSION - 1),
    memory=u64,
    identity=u64,
    flags=_flags("again"),
    table=_name,
)
"""Raise the version of the policy by one, if it is this."""
ADVANCED = WireMessage(Kind.ADVANCED, version=u64.to(_MOST_VERSION), memory=u64, flags=_flags("done"))
"""version: of the policy. memory: of the server; a request from another one changes nothing, unless it is sent again.
done: whether the request has made the version."""
LEARN = WireMessage(Kind.LEARN, identity=Field("bytes", 16), first=u64, wait=u32, table=_name, options=_json)
"""A learner begins, or goes on: its identity, and the number of its next call. wait: milliseconds that a draw may wait.
options: of its dataset, as `learner_options` packs them, or null. LEARNING answers it."""
LEARNING = WireMessage(Kind.LEARNING, flags=_flags("known"), described=_json)
"""known: whether the server has served it before. described: what its dataset is."""
CALL = WireMessage(
    Kind.CALL, number=u64, received=u64, flags=_flags("maps"), n=u32.to("rows"), ended=u64["n"], call=_json
)
"""Numbers of the call, from 1 on, and of the last answer that has arrived. maps: whether tensors of the answer may lie
in files of the server, which the learner maps. ended: numbers of answers to whose files it refers no more. call: a
list of its name, its options and a tree of values. Bulk part: the tensors of the tree. Calls are executed in order, and
once, though they come again over another connection. One with the number 0, and no call, only says what has arrived."""
ANSWER = WireMessage(Kind.ANSWER, tree=_json)
"""A tree of values; bulk part: its tensors. The header has the number of the call."""
METADATA = WireMessage(Kind.METADATA, name=_name, table=_name)
"""DESCRIBED answers it, with a bulk part only."""

MESSAGES = {each.kind: each for each in list(vars().values()) if isinstance(each, WireMessage)}
"""All of them by their kinds."""

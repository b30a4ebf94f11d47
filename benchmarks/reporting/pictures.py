"""Which pictures there are: one file and one description each, for every place that has the rows."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.reporting import bars, lines, plot_multi_server, plot_online
from benchmarks.reporting.findings import growths, headline
from benchmarks.reporting.rows import Comparison, Place, grouped, speed
from benchmarks.reporting.style import rates


@dataclasses.dataclass(frozen=True)
class Picture:
    """A plot of rows of one place; `alt` is for those who do not see it, `png` the bytes of the file."""

    name: str  # of the file, without its ending
    place: Place
    section: str  # an experiment, "headline" or "growth"
    caption: str
    alt: str
    png: bytes

    @property
    def width(self) -> int:
        """How wide it is to be shown, in CSS pixels."""
        return int.from_bytes(self.png[16:20], "big") * 96 // 150


_BARS = "Throughput; whiskers from p10 to p90; the dashed line is the limit."
_PICTURES: dict[
    str, tuple[Callable[[Sequence[Comparison]], bytes | None], str]
] = {  # the name's beginning is the section
    "headline": (bars.draw_headline, _BARS),
    "growth": (lines.draw_growth, "Ours, the limit, and of the others the one that is quickest most often."),
    "single-server": (bars.draw_single_server, _BARS),
    "batch-size": (lines.draw_batch_size, "Throughput against the size of a batch; bands from p10 to p90."),
    "collect": (
        lines.draw_collect,
        "Gathering against the size of a batch, with one size of blocks; bands from p10 to p90.",
    ),
    "collect-rows": (lines.draw_rows, "The kernel's share of the copy engine's rate."),
    "overhead": (
        partial(bars.draw_panels, "overhead"),
        "What a call costs beside plain torch or a plain copy; whiskers from p10 to p90.",
    ),
    "simulator": (
        partial(bars.draw_panels, "simulator"),
        "Writing a step of all environments; whiskers from p10 to p90; the dashed line is a ring of plain tensors.",
    ),
    "packed": (
        partial(bars.draw_panels, "packed"),
        "Packed batches of sequences of uneven length, by the token; whiskers from p10 to p90.",
    ),
    "graph": (
        partial(bars.draw_panels, "graph"),
        "Sampled neighbourhoods with features, by the seed; whiskers from p10 to p90.",
    ),
    "values": (
        partial(bars.draw_panels, "values"),
        "Batches of decoded images and frames, and of token sequences; whiskers from p10 to p90.",
    ),
    "data": (
        partial(bars.draw_panels, "data"),
        "Data sets from a disk, samples of later passes, and from a bucket, of the first; whiskers from p10 to p90.",
    ),
    "select": (
        lines.draw_select,
        "One cycle: draw a batch by priority, then set new priorities. Bands from p10 to p90; hollow marks where draws "
        "are not quite in proportion.",
    ),
    "online": (
        plot_online.draw,
        "Adding, setting priorities, and reading meanwhile; bands and whiskers from p10 to p90.",
    ),
    "remote-write": (
        partial(bars.draw_panels, "remote-write"),
        "Adding to a table of another process over loopback; whiskers from p10 to p90.",
    ),
    "remote-sample": (
        partial(bars.draw_panels, "remote-sample"),
        "Batches of a table of another process, over loopback or a slower link; whiskers from p10 to p90.",
    ),
    "checkpoint": (
        bars.draw_checkpoint,
        "Saving and loading; whiskers from p10 to p90; the dashed line is a plain write or read of as many bytes.",
    ),
    "exhaustion": (
        lines.draw_exhaustion,
        "Batches of 32 of tables larger than their memory, by the share in memory; bands from p10 to p90.",
    ),
    "memory": (
        partial(bars.draw_amounts, "memory"),
        "Bytes resident for each byte of payload, by distribution of lengths; the table has further variants.",
    ),
    "overlap": (bars.draw_overlap, "How many times as long training takes with the loader beside it."),
    "transitions": (
        partial(bars.draw_panels, "transitions"),
        "Transitions drawn, and steps appended; whiskers from p10 to p90.",
    ),
    "learn": (
        partial(bars.draw_amounts, "learn", apart="return"),
        "Seconds of training with either replay buffer; whiskers from p10 to p90 of the seeds.",
    ),
    "train": (bars.draw_train, "End to end: return over time, and samples a second."),
}


def draw_all(found: Sequence[Comparison]) -> list[Picture]:
    """Every picture that there are rows for. No picture has rows of two places."""
    made: list[Picture] = []
    names: Counter[str] = Counter()
    for place, there in sorted(grouped(found, lambda comparison: comparison.place).items()):
        device = _slug("gpu " + place.device if place.is_gpu else place.device)
        drawn = [
            (name, name.removesuffix("-rows"), caption, draw(there))
            for name, (draw, caption) in _PICTURES.items()
        ]
        for i, (network, rows) in enumerate(plot_multi_server.networks(there).items()):
            caption = (
                f"All nodes on one machine, over {network}; ours beside a bare exchange of as many bytes."
            )
            name = "multi-server" if i == 0 else f"multi-server-{_slug(network)}"
            drawn.append((name, "multi-server", caption, plot_multi_server.draw(rows)))
        for name, section, caption, png in drawn:
            if png is not None:
                stem = f"{name}-{device}"
                names[stem] += 1
                if names[stem] > 1:  # another machine with a device of this name
                    stem = f"{stem}-{names[stem]}"
                made.append(Picture(stem, place, section, caption, _alt(section, there, caption), png))
    return made


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "device"


def _alt(section: str, there: Sequence[Comparison], caption: str) -> str:
    """The picture in words: the figures where it has few."""
    if section == "headline" and (chosen := headline(there)) is not None:
        rows = sorted(chosen.rows.values(), key=speed, reverse=True)
        return "Bars: " + ", ".join(f"{row['variant']} {rates(row)[1]:.3g} GB/s" for row in rows) + "."
    if section == "growth":
        return "Lines, one panel each, against: " + ", ".join(growth.along for growth in growths(there)) + "."
    return caption

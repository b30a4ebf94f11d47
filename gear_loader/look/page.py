"""The page of `gear-loader look`: one HTML file that needs nothing else, with pictures of frames and curves."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.errors import StaleIndexError
from gear_loader.look.summary import Summary, note, number, spread
from gear_loader.sources._optional import require
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.formatting import size

_MOST_CURVES = 16
_FRAMES = 8
_MOST_LINES = 20

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ name }}</title><style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em } h3 { font-size: 1em; margin-bottom: .2em }
table { border-collapse: collapse; width: 100% } th, td { padding: .25em .7em; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #999 } tr:nth-child(even) { background: #f5f5f5 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td { overflow-wrap: anywhere } svg, img { max-width: 100%; height: auto }
pre { background: #f5f5f5; padding: .6em; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 20em;
      overflow-y: auto }
figure { margin: .5em 0 } figcaption { color: #666; font-size: .9em }
</style></head><body>
<h1>{{ name }}</h1>
<p>{{ episodes }} episodes, {{ steps }} steps, {{ bytes }}.
{% if lengths %}Lengths from {{ shortest }} to {{ longest }}, median {{ median }}.{% endif %}</p>
{% if lengths %}<figure>{{ lengths }}</figure>{% endif %}
<h2>Columns</h2>
{% if read %}<p>Ranges are of {{ read }} episodes, evenly spaced.</p>{% endif %}
<table><tr><th>column</th><th>kind</th><th>per</th><th class="n">min</th><th class="n">mean</th><th class="n">max</th>
<th class="n">deviation</th><th>note</th></tr>
{% for c in columns %}<tr><td>{{ c.name }}</td><td>{{ c.kind }}</td><td>{{ c.per }}</td><td class="n">{{ c.low }}</td>
<td class="n">{{ c.mean }}</td><td class="n">{{ c.high }}</td><td class="n">{{ c.deviation }}</td><td>{{ c.note }}</td>
</tr>{% endfor %}</table>
{% for e in shown %}<h2>Episode {{ e.number }}: {{ e.length }} steps</h2>
{% if e.once %}<table>
{% for name, value in e.once %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
{% endif %}
{% for name, picture, caption in e.frames %}<h3>{{ name }}</h3><figure><img alt="{{ name }}"
src="data:image/png;base64,{{ picture }}"><figcaption>{{ caption }}</figcaption></figure>{% endfor %}
{% for name, picture in e.curves %}<h3>{{ name }}</h3><figure>{{ picture }}</figure>{% endfor %}
{% for name, lines in e.texts %}<h3>{{ name }}</h3><pre>{{ lines }}</pre>{% endfor %}
{% endfor %}
</body></html>
"""


def page(table: Table, found: Summary, episodes: Sequence[int]) -> str:
    """The page as text.

    Args:
        episodes: numbers of the episodes that are shown, in the order of the table.

    Raises:
        ImportError: jinja2, matplotlib or Pillow is not installed.
    """
    jinja2 = require("jinja2", "The page of an episode")
    lengths, indices = found.lengths, table.indices()
    shown = [_episode(table, each, int(indices[each])) for each in episodes if each < len(indices)]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    picture = jinja2.utils.markupsafe.Markup(_histogram(lengths)) if len(lengths) else ""
    return str(
        environment.from_string(_TEMPLATE).render(
            name=found.name,
            episodes=f"{len(lengths):,}",
            steps=f"{found.steps:,}",
            bytes=size(found.bytes),
            lengths=picture,
            shortest=f"{lengths.min():,}" if len(lengths) else "",
            longest=f"{lengths.max():,}" if len(lengths) else "",
            median=f"{np.median(lengths):,.0f}" if len(lengths) else "",
            read=f"{found.read:,}" if found.read < len(lengths) else "",
            columns=[
                {
                    "name": each.name,
                    "kind": each.kind,
                    "per": each.per,
                    **dict(zip(("low", "mean", "high", "deviation"), map(number, each.ranges), strict=True)),
                    "note": note(each),
                }
                for each in found.columns
            ],
            shown=[each for each in shown if each is not None],
        )
    )


def _episode(table: Table, place: int, index: int) -> dict[str, Any] | None:
    """What is shown of an episode; None if it is gone."""
    from markupsafe import Markup

    try:
        values = table[index]
    except StaleIndexError:
        return None
    once, frames, curves, texts, length = [], [], [], [], 0
    for name, value in values.items():
        if table.schema[name].trajectory:
            once.append((name, _short(value)))
            continue
        length = len(value)
        images = _images(value)
        if images is not None:
            chosen = spread(len(images), _FRAMES)
            caption = f"steps {', '.join(map(str, chosen))}"
            frames.append((name, _strip([images[each] for each in chosen]), caption))
        elif isinstance(value, torch.Tensor):
            rows = value.float().reshape(length, -1).numpy()
            if rows.shape[1] <= _MOST_CURVES:
                curves.append((name, Markup(_curves(rows))))
        else:
            texts.append((name, _lines(value)))
    return {
        "number": place,
        "length": length,
        "once": once,
        "frames": frames,
        "curves": curves,
        "texts": texts,
    }


def _images(value: Any) -> list[Array] | None:
    """The frames of a column of images, uint8 [h, w, 1, 3 or 4] each; None of another one."""
    rows = value if isinstance(value, list) else [value] if isinstance(value, torch.Tensor) else []
    if not rows or not isinstance(rows[0], torch.Tensor) or rows[0].dtype != torch.uint8:
        return None
    found = list(value) if isinstance(value, torch.Tensor) else rows
    if not all(each.ndim in (2, 3) and min(each.shape[-2:]) > 0 for each in found):
        return None
    frames = []
    for each in found:
        frame = each[..., None] if each.ndim == 2 else each
        if frame.shape[-1] not in (1, 3, 4):
            if frame.shape[0] not in (1, 3, 4):
                return None
            frame = frame.permute(1, 2, 0)
        if min(frame.shape[:2]) < 4:  # numbers, and no picture
            return None
        frames.append(frame.numpy())
    return frames or None


def _strip(frames: Sequence[Array], height: int = 160) -> str:
    """Frames side by side, a PNG in base64."""
    image = require("PIL.Image", "Pictures of frames")
    made = []
    for each in frames:
        picture = image.fromarray(np.ascontiguousarray(each[..., 0] if each.shape[-1] == 1 else each))
        scale = height / picture.height
        nearest = image.Resampling.NEAREST if scale > 1 else image.Resampling.BILINEAR
        made.append(picture.convert("RGB").resize((max(1, round(picture.width * scale)), height), nearest))
    strip = image.new("RGB", (sum(each.width for each in made) + 4 * (len(made) - 1), height), "white")
    left = 0
    for each in made:
        strip.paste(each, (left, 0))
        left += each.width + 4
    stream = io.BytesIO()
    strip.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure = require("matplotlib.figure", "Curves of an episode").Figure((width, height), layout="tight")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _histogram(lengths: Array) -> str:
    figure, axes = _figure(8, 1.8)
    axes.hist(lengths, bins=min(60, max(int(lengths.max() - lengths.min()) + 1, 1)), color="#4878a8")
    axes.set_xlabel("steps of an episode")
    axes.set_ylabel("episodes")
    return _svg(figure)


def _curves(rows: Array) -> str:
    """A line for each element over the steps."""
    figure, axes = _figure(8, 1.8)
    single = len(rows) == 1
    for place in range(rows.shape[1]):
        axes.plot(
            rows[:, place],
            linewidth=1,
            marker="." if single else None,
            label=str(place) if rows.shape[1] > 1 else None,
        )
    if rows.shape[1] > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, frameon=False, ncols=2)
    axes.set_xlabel("step")
    return _svg(figure)


def _lines(value: Any) -> str:
    """The first values of a column of text, objects or ragged arrays, a line each."""
    rows = value.tolist() if isinstance(value, Ragged) else value
    lines = [f"{step}: {_short(rows[step])}" for step in range(min(len(rows), _MOST_LINES))]
    return "\n".join([*lines, "..."] if len(rows) > _MOST_LINES else lines)


def _short(value: Any, most: int = 400) -> str:
    text = (
        value
        if isinstance(value, str)
        else repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    )
    return text if len(text) <= most else f"{text[:most]} ..."

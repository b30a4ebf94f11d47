"""The notice about an epoch that is short for the table."""

from __future__ import annotations

import itertools

from gear_loader.selection.selectors import Selector
from gear_loader.utils.notices import notice

__all__ = ["notice_short_epoch"]

_number = itertools.count()


def notice_short_epoch(
    selector: Selector, *, batches: int, batch_size: int, trajectories: int, steps: int, widest: int
) -> bool:
    """Log a notice if an epoch reads a small part of the table; return whether it did.

    Args:
        selector: the selector; with ``unit="step"`` an epoch is never short.
        batches, batch_size: of an epoch on all ranks together.
        trajectories, steps: what is drawn from.
        widest: steps of the longest window. Windows that together can cover half of the steps are enough.
    """
    rows = batches * batch_size
    if selector.unit == "step" or 10 * rows >= steps or 2 * rows * widest >= steps:
        return False
    notice(
        f"short-epoch-{next(_number)}",
        f"An epoch has {batches:,} batch{'es' if batches > 1 else ''} of {batch_size:,}: {selector!r} draws "
        f"trajectories, and an epoch draws as many as there are ({trajectories:,}), whatever their length "
        f"({steps:,} steps, or {-(-steps // batch_size):,} batches of single steps). Give batches_per_epoch= for "
        'longer epochs, or a selector with unit="step", whose epoch draws as many steps as there are.',
    )
    return True

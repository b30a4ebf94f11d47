"""Warnings that are logged once, for example about an unavailable fast path."""

from __future__ import annotations

import logging

_logger = logging.getLogger("gear_loader")
_seen: dict[
    str, list[str]
] = {}  # without a lock, which a signal handler would wait for if it interrupts its holder


def notice(key: str, message: str) -> None:
    """Log `message` as a warning, once for each `key` in this process."""
    entry = [message]
    if _seen.setdefault(key, entry) is not entry:
        return
    _logger.warning("%s", message)


def notices() -> dict[str, str]:
    """All notices of this process so far, by key."""
    return {key: entry[0] for key, entry in list(_seen.items())}

"""Warnings that are logged once, for example about an unavailable fast path."""

from __future__ import annotations

import logging
import threading

__all__ = ["notice", "notices"]

_logger = logging.getLogger("gear_loader")
_seen: dict[str, str] = {}
_lock = threading.Lock()


def notice(key: str, message: str) -> None:
    """Log `message` as a warning, once for each `key` in this process."""
    with _lock:
        if key in _seen:
            return
        _seen[key] = message
    _logger.warning("%s", message)


def notices() -> dict[str, str]:
    """All notices of this process so far, by key."""
    with _lock:
        return dict(_seen)

"""Priorities that are no numbers to draw by; apart, because clients of a server know them without loading torch."""

from __future__ import annotations

__all__ = ["GONE", "UNSET"]

UNSET, GONE = -1.0, -2.0
"""The running maximum; a removed item."""

"""States of a slot."""

from __future__ import annotations

__all__ = ["FREE", "READY", "RETIRED", "WRITING"]

FREE, WRITING, READY, RETIRED = range(4)

"""States of a slot."""

from __future__ import annotations

FREE, WRITING, READY, RETIRED = range(4)

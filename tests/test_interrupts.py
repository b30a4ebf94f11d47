"""An exception at any bytecode leaves nothing behind: no lock, no read ticket, no slot that is being written.

Two ways to interrupt: a trace function that raises at the n-th opcode inside the package, for every n (exact, and on
every machine alike); and real signals, whose handler raises after a random time.
"""

from __future__ import annotations

from pathlib import Path

import gear_loader as gear

PACKAGE = str(Path(gear.__file__).parent)
"""
"""

"""What multiprocessing's fork server has loaded, from which tests start ranks and servers.

Of loops it loads the machine code that numba has kept, and runs none: no threads, no locks. Else each rank would load
those that it uses.
"""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

gc.disable()  # until all is loaded, which the processes do not search either

sys.path[:0] = [str(Path(__file__).parent)]  # the server's own does not have the tests' folder
for module in (
    *(
        "pytest",
        "gear_loader.dataset",
        "gear_loader.distributed.shard_source",
        "gear_loader.transport.server",
    ),
    *("distributed_common", "table_common"),
):
    importlib.import_module(module)
for loop in importlib.import_module("gear_loader.native.compile").loops:
    kept = loop._cache
    index = kept._cache_file._load_index() if hasattr(kept, "_cache_file") else {}
    for signature, *_ in index:
        if kept._index_key(signature, loop.targetctx.codegen()) in index:  # else it would be compiled
            loop.compile(signature)
gc.freeze()
gc.enable()

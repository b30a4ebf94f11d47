"""Import of the optional packages that sources need."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_EXTRAS = {
    "av": "video",
    "datasets": "data",
    "google_crc32c": "robots",
    "huggingface_hub": "data",
    "pyarrow": "data",
    "zarr": "robots",
}


def require(module: str, purpose: str) -> Any:
    """Import an optional package on first use.

    Args:
        module: name of the package. purpose: beginning of the error, such as "Reading an HDF5 file".

    Raises:
        ImportError: the package is not installed; the message names what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs the package {module!r}, which cannot be imported ({error}). "
            f"Install it: pip install '.[{_EXTRAS.get(module.partition('.')[0], 'sources')}]' (in a clone of Gear "
            "Loader)",
            name=module,
        ) from error


def release_arrow_memory() -> None:
    """Give memory that Arrow no longer uses back to the system, of which it keeps hundreds of MB for itself."""
    if (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.default_memory_pool().release_unused()

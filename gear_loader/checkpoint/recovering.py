"""Bringing a table back that was written in the background."""

from __future__ import annotations

import dataclasses
import logging

from gear_loader.checkpoint.behind import finish_dropped, start
from gear_loader.checkpoint.disk_place import Place, open_place
from gear_loader.checkpoint.housekeeping import convert_errors, restore_previous
from gear_loader.checkpoint.loading import LoadOptions, UnfitError, discard, load_version
from gear_loader.checkpoint.manifest import previous_of, read_manifest
from gear_loader.errors import CheckpointError
from gear_loader.storage.disk import Disk, DiskWriter
from gear_loader.storage.table import Table
from gear_loader.utils.addresses import is_of_store

_logger = logging.getLogger("gear_loader")


def recover(kind: type[Table], disk: Disk, options: LoadOptions) -> tuple[Table, DiskWriter]:
    """Create a table from what was written last, and go on writing it. See `Table.recover`."""
    options = dataclasses.replace(options, disk=disk)
    finish_dropped(disk)
    place = open_place(disk, options.name, recover=True)
    table = None
    try:
        with convert_errors(place.directory.path):
            table = _load_newest(kind, place, options)
            place.look()
        return table, start(table, place)
    except BaseException:
        place.close()
        if table is not None:
            discard(table)
        raise


def _load_newest(kind: type[Table], place: Place, options: LoadOptions) -> Table:
    """Load the current checkpoint or, if it is damaged, the one before it."""
    directory = place.directory
    try:
        return load_version(kind, directory, read_manifest(directory), options)
    except UnfitError:
        raise
    except CheckpointError as error:
        previous = previous_of(directory)
        if previous is None or isinstance(error.__cause__, PermissionError) or is_of_store(error):
            raise
        try:
            table = load_version(kind, directory, previous, options)
        except UnfitError:
            raise
        except CheckpointError:
            raise error from None
        restore_previous(directory)
        _logger.warning(
            "%s The checkpoint before it was recovered, with %d trajectories; what was committed after it is lost.",
            error,
            len(table),
        )
        return table

"""The operations on a table's index, on raw arrays. The caller holds the lock.

There is one implementation, compiled by numba (`entry_points.COMPILED`); tests that kill a process at every store run
it as Python (`entry_points.PLAIN`). It consists of loops over plain arrays in which the order of stores matters: a
process may be killed after any of them.

Another process may have written invalid values into the index by mistake. So every value that is used as an index is
checked, loops end for any contents, and an invalid value raises IndexError, which `index_arrays` converts to an error
that names the table. The index then stays marked dirty.

The slots are authoritative (see `recovery`). An operation on several slots writes an intent record into `counters` when
the data of the record are complete; recovery replays it:

    COMMITTING    1 + first sequence number of the slots that become READY
    REMOVING      1 while the slots with owner `MARKED` are retired
    DRAWING       1 + slot counted as drawn; DRAWING_TIMES, DRAWING_TOTAL: its new count and the new total
    LEAVING       1 + slot being retired; LEAVING_COUNT, LEAVING_TOTAL: position and new value of its counter
    RAISING       new NEXT_SEQUENCE; RAISING_FIRST: new FIRST_SEQUENCE
"""

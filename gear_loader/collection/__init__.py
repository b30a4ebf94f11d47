"""Collection of batches from drawn rows: windows, buffers, gathering, prefetching."""

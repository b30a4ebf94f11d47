"""Chosen rows become a batch: windows, buffers, gathering, prefetching."""

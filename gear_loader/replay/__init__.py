"""Replay buffers of one line, over a table and a dataset that stay reachable."""

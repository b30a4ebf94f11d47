"""Adding to a store of another process: the task of `online`, by libraries that do it in another way over a network."""

from __future__ import annotations

from benchmarks.peers.online import Subject, Worker

__all__ = ["Subject", "Worker"]

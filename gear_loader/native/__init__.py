"""The compiled loops of the CPU path: copying, threads that share a copy, the sum tree."""

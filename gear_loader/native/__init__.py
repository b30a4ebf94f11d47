"""The compiled loops of the CPU path: copying, gathering, threads that share a gather, the sum tree."""

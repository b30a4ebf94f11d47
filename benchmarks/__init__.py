"""Benchmarks of Gear Loader: ``python -m benchmarks COMMAND``, from the repository's root.

Every command shows that all variants give the same result before it times them, takes the variants in turn (A B C,
A B C, ...) so that a noisy machine is noisy for all of them, and appends one JSON line a measurement to a file.
"""

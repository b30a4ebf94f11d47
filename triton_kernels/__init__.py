"""Kernels: raw tensors in, raw tensors out; torch and triton only. Imported as `gear_loader.kernels`.

One file an operation, the private kernel above its launcher; `reference` holds the plain-torch twin of each. The
modules with kernels import Triton, so they are imported where they are used.
"""

"""Kernels on raw tensors; depend on torch and triton only. Imported as `gear_loader.kernels`.

One file per operation, the private kernel above its launcher; `reference` holds the plain-torch twins. Modules with
kernels import Triton, so callers import them in functions.
"""

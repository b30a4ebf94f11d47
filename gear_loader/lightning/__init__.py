"""Data module and callback for Lightning."""

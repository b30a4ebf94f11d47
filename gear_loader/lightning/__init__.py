"""The data module and the callback for Lightning."""

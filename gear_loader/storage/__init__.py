"""A table: its memory, its index, and the operations that change it."""

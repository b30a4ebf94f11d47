"""The same five programs in several libraries, of which docs/lines.md counts the lines."""

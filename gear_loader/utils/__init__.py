"""Helpers that do not depend on tables: argument checks, waiting, notices, progress bars."""

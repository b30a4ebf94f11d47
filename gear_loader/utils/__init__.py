"""Small helpers that know nothing of tables: arguments, waiting, notices, progress."""

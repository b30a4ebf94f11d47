"""Several nodes on one machine, for `multi-server`: their processes, and the bare exchanges as yardsticks."""

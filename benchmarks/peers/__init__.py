"""Other libraries, each measured in an interpreter of its own: see `make.sh` (its environments), `environments`."""

"""Other libraries, each measured in an interpreter of its own: `make.sh` makes these, `serve.py` runs in them."""

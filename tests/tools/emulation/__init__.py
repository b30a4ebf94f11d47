"""Execute on the host what Triton compiled for a GPU: PTX instructions over the threads of one block at a time."""

"""A stand-in for `torch.cuda` whose streams hold deferred work and do their worst."""

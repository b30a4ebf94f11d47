"""Selection of a batch's rows: samplers, random numbers, priorities."""

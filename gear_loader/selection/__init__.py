"""Which rows a batch has: selectors, random numbers, priorities."""

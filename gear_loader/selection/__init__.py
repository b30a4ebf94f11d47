"""Selection of a batch's rows: selectors, random numbers, priorities."""

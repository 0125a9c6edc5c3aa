"""Which code does a job run? Captured, distributed, verified, and laid out so that ranks can run from it."""

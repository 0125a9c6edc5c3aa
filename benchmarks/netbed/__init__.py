"""A small cluster on one machine, whose network and processors can be hurt. See `bed`."""

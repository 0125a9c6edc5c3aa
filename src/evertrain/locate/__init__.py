"""Who or what is to blame: stacks, flight recorders and RAS reports → findings, and findings → verdicts. Pure."""

"""Where nodes come from, when a job is short of them."""

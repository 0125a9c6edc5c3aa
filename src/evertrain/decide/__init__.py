"""Pure: job state and event become job state and actions."""

"""The process on every node."""

"""The small parent of all ranks on a node. Standard library only."""

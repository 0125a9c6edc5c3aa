"""Torch-free: which steps exist, which one all ranks can restore, and the disk tier."""

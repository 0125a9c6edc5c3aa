"""Torch-free: which steps exist, which one all ranks can restore, the disk tier, and who holds whose backup."""

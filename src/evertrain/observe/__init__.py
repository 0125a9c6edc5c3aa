"""Readers: what sensors saw, and where they are blind."""

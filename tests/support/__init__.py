"""Helpers of the tests: start a job as a user would, look at it, hurt it, and leave nothing behind."""

"""What can be wrong with code that is captured or brought here?"""

from __future__ import annotations

from evertrain.model.errors import EvertrainError


class TreeError(EvertrainError):
    """A folder cannot be captured; one line that says what to do instead."""


class ArchiveError(EvertrainError):
    """An archive is damaged, is not the one that was asked for, or holds what no version of code holds."""

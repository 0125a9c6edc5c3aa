"""What is the same for all records of the event log? A time, and that their name says of which kind they are."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    time: float
    """Seconds by the run's clock when the controller wrote this; all other times in records are by it as well."""

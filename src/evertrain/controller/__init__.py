"""The process that serves a job: API, event store, conductor."""

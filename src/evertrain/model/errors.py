"""Everything that we raise on purpose.

    EvertrainError
    ├── UsageError          the user asked for something that cannot be: one line, exit code 2
    └── TroubleError        the machine does not give what is needed: one line, exit code 1

Each message names the rank or node where there is one, and the next step for the user.
"""


class EvertrainError(Exception):
    """Base of all; `str()` is one clear line."""


class UsageError(EvertrainError):
    """The command line or the config is wrong; nothing was started."""


class TroubleError(EvertrainError):
    """The command was right but the machine cannot do it now."""

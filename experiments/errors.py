"""The two ways a binary ends badly; both print one line and no traceback."""


class UsageError(Exception):
    """The command line or config asks for what cannot be done (exit code 2)."""


class RunError(Exception):
    """The command was right, but something on this machine is not (exit code 1)."""

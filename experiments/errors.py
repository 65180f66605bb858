"""The two ways in which a binary fails with one line and no traceback."""


class UsageError(Exception):
    """The command line or config asks for what cannot be done (exit code 2)."""


class RunError(Exception):
    """The command was right, but something on this machine is not (exit code 1)."""


def one_line(error: Exception, limit: int = 500) -> str:
    """The message of an exception, on one line and of bounded length."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = " ".join(str(message).split())
    return text if len(text) <= limit else text[:limit] + " ..."

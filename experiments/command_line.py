"""How every binary starts: flags, one-line errors, exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from experiments import tuple_flags
from experiments.errors import RunError, UsageError, one_line

DONE, FAILED, WRONG_USAGE = 0, 1, 2


def run(main: Callable[[], None], config_keys: Sequence[str]) -> None:
    """Parses the flags, calls `main` and exits with the right code.

    `UsageError`, `RunError` and `OSError` become one line on stderr. Any other
    exception is a defect of the program and keeps its traceback.

    Args:
      main: The program.
      config_keys: The keys of its config, named to whoever misses one.
    """
    tuple_flags.register()
    app.run(
        lambda _: sys.exit(_guarded(main)),
        flags_parser=lambda argv: _parse_flags(argv, config_keys),
    )


def load_config(name: str = "config") -> ml_collections.ConfigDict:
    """The config that `--config=FILE.py --config.key=value` describes.

    Raises:
      UsageError: The flag is missing or its file does not return a `ConfigDict`.
    """
    flag: Any = flags.FLAGS[name]
    if flag.value is None:
        raise UsageError(f"--{name} is missing: give --{name}=FILE.py")
    if isinstance(flag.value, ml_collections.ConfigDict):
        return flag.value
    raise UsageError(
        f"--{name}={flag.config_filename}: expected a Python file whose get_config() "
        "returns an ml_collections.ConfigDict"
    )


def overridden_keys(name: str = "config") -> set[str]:
    """The config keys that the command line itself sets."""
    return set(config_flags.get_override_values(flags.FLAGS[name]))


def _parse_flags(argv: Sequence[str], config_keys: Sequence[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
    except SystemExit:
        # Only --help and its kin leave from here; absl has them fail.
        sys.exit(DONE)
    except Exception as error:
        # ml_collections runs the user's config file here, so anything may surface.
        _exit_wrong_usage(_parse_message(error, config_keys))
    if len(rest) > 1:
        _exit_wrong_usage(f"unexpected argument {rest[1]!r}: flags start with --")
    if flags.FLAGS["verbosity"].using_default_value:
        # Orbax logs every rename, and again each error that it raises.
        logging.set_verbosity(logging.FATAL)
    return rest


def _exit_wrong_usage(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(WRONG_USAGE)


def _parse_message(error: Exception, config_keys: Sequence[str]) -> str:
    message = one_line(error)
    if isinstance(error, flags.Error):
        for sign, expected in _EXPECTED.items():
            if sign in message:
                return f"{message.partition(': ')[0]}: expected {expected}"
        return message
    key = re.match(r"[\"'\\]+(\w+)", str(error))
    if isinstance(error, AttributeError | KeyError) and key:
        close = difflib.get_close_matches(key[1], config_keys, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        return (
            f"config key {key[1]!r} is unknown: {hint}the keys are "
            f"{', '.join(config_keys)}"
        )
    return f"the config file failed: {type(error).__name__}: {message}"


_EXPECTED = {
    "invalid literal for int()": "an integer",
    "could not convert string to float": "a number",
}


def _guarded(main: Callable[[], None]) -> int:
    try:
        main()
    except UsageError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return WRONG_USAGE
    except (RunError, OSError) as error:
        # The system's errors (disk full, no permission) name the file themselves.
        print(f"error: {one_line(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return FAILED
    return DONE

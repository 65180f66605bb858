"""Tuples on the command line as A,B,C, whatever A, B and C are."""

import ast
from typing import Any

from ml_collections import config_flags
from ml_collections.config_flags import tuple_parser


class TupleParser(tuple_parser.TupleParser):
    """Takes what is no Python as strings with commas between.

    The parser of ml_collections refuses `/models/a,/models/b`, as a division that lacks
    its left side.

    Example:
      >>> TupleParser().parse("/models/a,/models/b")
      ('/models/a', '/models/b')
      >>> TupleParser().parse("50,100")
      (50, 100)
      >>> TupleParser().parse("")
      ()
    """

    def parse(self, argument: Any) -> tuple[Any, ...]:
        """Returns the tuple that `argument` stands for."""
        if isinstance(argument, str) and not _is_python(argument):
            return tuple(part.strip() for part in argument.split(",") if part.strip())
        return super().parse(argument)


def register() -> None:
    """Makes the flags of configs use `TupleParser`."""
    config_flags.register_flag_parser_for_type(tuple, TupleParser())


def _is_python(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return False
    return True

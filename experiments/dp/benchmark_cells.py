"""What a benchmark measures: models, the shapes of their inputs, and batch sizes.

A cell is written `MODEL@SHAPE@BATCH`, with the model as `experiments.models.registry`
has it, the dimensions of one input joined by x, and the number of examples:

    mlp@28x28x1@128
    resnet18:width=16@32x32x3@16
    transformer@512@32

A fourth part leaves methods out that would take too long or too much memory:

    vgg16@256x256x3@128@without=multi_loss+vmap
"""

import dataclasses
from collections.abc import Sequence

from experiments.errors import UsageError

_WITHOUT = "without="


@dataclasses.dataclass(frozen=True)
class CellSpec:
    """One model, one shape of inputs, one batch size.

    Attributes:
      model: A spec of `experiments.models.registry`.
      input_shape: Of one example: (H, W, C) for images, (T,) for token ids.
      batch_size: Examples per step.
      without: Methods that are left out.
    """

    model: str
    input_shape: tuple[int, ...]
    batch_size: int
    without: tuple[str, ...] = ()

    @property
    def shape_name(self) -> str:
        """Such as 28x28x1."""
        return "x".join(str(size) for size in self.input_shape)

    def __str__(self) -> str:
        """Names the cell for people."""
        return f"{self.model} {self.shape_name}, batch {self.batch_size}"


def parse(text: str, methods: Sequence[str]) -> CellSpec:
    """Reads a cell as the config has it.

    Args:
      text: See the module.
      methods: Those that can be left out.

    Raises:
      UsageError: Names the part that is wrong.

    Example:
      >>> parse("cnn@28x28x1@8@without=vmap", ["auto", "vmap"])
      CellSpec(model='cnn', input_shape=(28, 28, 1), batch_size=8, without=('vmap',))
    """
    model, *rest = text.split("@")
    if not model or len(rest) not in (2, 3):
        raise _wrong(text, "MODEL@SHAPE@BATCH, such as mlp@28x28x1@128")
    shape = [_positive(size) for size in rest[0].split("x")]
    if None in shape:
        raise _wrong(text, f"sizes >= 1 with x between, such as 28x28x1, not {rest[0]}")
    batch_size = _positive(rest[1])
    if batch_size is None:
        raise _wrong(text, f"a batch size >= 1, not {rest[1]}")
    without: tuple[str, ...] = ()
    if len(rest) == 3:
        without = tuple(rest[2].removeprefix(_WITHOUT).split("+"))
        known = all(name in methods for name in without)
        if not rest[2].startswith(_WITHOUT) or not known:
            raise _wrong(
                text,
                f"{_WITHOUT}METHOD+METHOD of {', '.join(methods)}, not {rest[2]}",
            )
    return CellSpec(model, tuple(s for s in shape if s), batch_size, without)


def _positive(text: str) -> int | None:
    is_number = text.isascii() and text.isdigit() and int(text) >= 1
    return int(text) if is_number else None


def _wrong(text: str, expected: str) -> UsageError:
    return UsageError(
        f"config.cells has {text!r}, expected {expected}: change --config.cells"
    )

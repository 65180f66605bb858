"""The tokens by which a T5 names the blanks of its inputs."""

import dataclasses

from experiments.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Sentinels:
    """The tokens that stand for runs, `first`, `first` - 1, and so on.

    Attributes:
      first: The one of the first blank; T5's <extra_id_0> is the last entry of its
        tokenizer, though the model's embedding has rows beyond it.
      number: How many there are.
    """

    first: int
    number: int

    def __post_init__(self) -> None:
        """Raises `UsageError` about sentinels that are no token ids."""
        if self.number < 1 or self.first - self.number < -1:
            raise UsageError(
                f"{self.number} sentinels from {self.first} downwards, expected at "
                "least one and no id below 0: correct the number"
            )


T5_SENTINELS = Sentinels(first=32_099, number=100)

"""How plain the text of windows is, whichever model is asked."""

import numpy as np
import polars

from experiments.extraction import near_misses


def add(
    windows: polars.DataFrame, is_whitespace_V: np.ndarray | None
) -> polars.DataFrame:
    """Adds the columns `whitespace` and `entropy`, see `records.COLUMNS`.

    Args:
      windows: Rows of windows.parquet, at least one, all of one length.
      is_whitespace_V: What `near_misses.whitespace_tokens` says; None leaves
        `whitespace` null.

    Example:
      >>> windows = polars.DataFrame({"length": 2, "tokens": [[0, 0], [0, 1]]})
      >>> added = add(windows, np.array([False, True]))
      >>> added["whitespace"].to_list(), added["entropy"].to_list()
      ([0.0, 0.5], [0.0, 1.0])
    """
    tokens_KxL = windows["tokens"].list.to_array(int(windows["length"][0])).to_numpy()
    whitespace: polars.Expr | polars.Series = polars.lit(None, polars.Float32())
    if is_whitespace_V is not None:
        share_K = near_misses.whitespace_share(tokens_KxL, is_whitespace_V)
        whitespace = polars.Series(share_K)
    return windows.with_columns(
        whitespace=whitespace, entropy=near_misses.token_entropy(tokens_KxL)
    )

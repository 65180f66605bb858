"""Refuses statistics over a batch, where their names give them away."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

PyTree: TypeAlias = Any

# Flax: the Linen collection, the name Linen gives a layer, the NNX variable's class.
_COLLECTION = "batch_stats"
_LAYER = "BatchNorm"
_VARIABLE = "BatchStat"


def require_none(tree: PyTree, root: str) -> None:
    """Raises ValueError, naming the path, if a pytree holds batch statistics.

    They are known by Flax's names: anything under a key or attribute `batch_stats`
    (Linen), `mean` and `var` of a layer called `BatchNorm...` (Linen), NNX variables of
    class `BatchStat`. Statistics under other names are not found, nor are those that
    `fun` drops: see `dpjax.require_separable`.

    Example:
      >>> require_none({"params": {"BatchNorm_0": {"scale": 1.0}}}, "aux")
      >>> require_none({"batch_stats": {"norm": {"mean": 0.0}}}, "aux")
      Traceback (most recent call last):
      ...
      ValueError: aux['batch_stats']['norm']['mean'] is a batch statistic, but ...

    Args:
      tree: parameters, or what a loss function returned beside the loss.
      root: what to call the tree in the message.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_batch_stat)[0]
    found = [path for path, leaf in leaves if _is_statistic(path, leaf)]
    if not found:
        return
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise ValueError(
        f"{root}{jax.tree_util.keystr(found[0])} is a batch statistic{others}, but fun "
        "sees one example, whose statistics make another model, and running averages "
        "of them mix examples without privacy: use GroupNorm or LayerNorm, or "
        "use_running_average=True with the statistics in an argument that argnums "
        "leaves out, and do not return them"
    )


def _is_batch_stat(node: Any) -> bool:
    return any(base.__name__ == _VARIABLE for base in type(node).__mro__)


def _is_statistic(path: Sequence[Any], leaf: Any) -> bool:
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    is_of_layer = names[-1:] in (["mean"], ["var"]) and any(
        name.startswith(_LAYER) for name in names
    )
    return _COLLECTION in names or is_of_layer or _is_batch_stat(leaf)

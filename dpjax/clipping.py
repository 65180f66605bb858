"""The public transforms: sums of clipped gradients, and per-example gradient norms."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, get_args

import dp_accounting
import jax
import jax.numpy as jnp
import optax

from dpjax import bookkeeping, methods, per_example, recording, reweighting
from dpjax.calling import Call, Convention
from dpjax.clip_factors import Clipping
from dpjax.methods import Method
from dpjax.outer_products import SquaredNorm
from dpjax.per_example import ClippedBatch
from dpjax.precision import wide_dtype
from dpjax.tracing import Traced

PyTree: TypeAlias = Any

# The norm used for clipping is the computed one plus a bound on its rounding. Where the
# bound is more than this share of the squared norm, the terms cancelled and the example
# is clipped by its formed gradient instead.
_LARGEST_ROUNDING = 1e-2
# A norm of 1e-15 may be reported as 0; a gradient of zeros is not formed for that.
_LEAST_REPORTED = 1e-30


class Aux(NamedTuple):
    """Per-example results beside the gradient; None where not asked for.

    Attributes:
      values: losses, of shape [B].
      grad_norms: norms of the gradients before clipping, float[B].
      aux: what `fun` returned beside the loss, each array with a leading batch axis.
    """

    values: Any
    grad_norms: Any
    aux: Any


@dataclasses.dataclass(frozen=True, eq=False)
class ClippedGrad:
    """A function that returns a sum of clipped per-example gradients.

    Attributes:
      fun: the function.
      l2_norm_bound: the largest L2 norm that one example can contribute to the sum.
      has_aux: whether `fun` returns `(sum, Aux)`; the bound holds for the sum only.
    """

    fun: Callable[..., Any]
    l2_norm_bound: Any
    has_aux: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `fun`."""
        return self.fun(*args, **kwargs)

    def sensitivity(
        self,
        neighboring_relation: dp_accounting.NeighboringRelation = (
            dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        ),
    ) -> Any:
        """L2 sensitivity of the sum when one example (or user) changes.

        Args:
          neighboring_relation: adding or removing an example, or replacing it by a
            padding example (REPLACE_SPECIAL): the bound. Replacing it by another
            (REPLACE_ONE): twice the bound.
        """
        relations = dp_accounting.NeighboringRelation
        if neighboring_relation is relations.REPLACE_ONE:
            return 2 * self.l2_norm_bound
        if neighboring_relation in (
            relations.ADD_OR_REMOVE_ONE,
            relations.REPLACE_SPECIAL,
        ):
            return self.l2_norm_bound
        raise ValueError(
            f"neighboring_relation={neighboring_relation!r} must be one of "
            "dp_accounting.NeighboringRelation"
        )


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Everything `clipped_grad` was told; see there."""

    convention: Convention
    clipping: Clipping
    normalize_by: float
    return_values: bool
    return_grad_norms: bool
    pre_clipping_transform: Callable[[PyTree], PyTree] | None
    microbatch_size: int | None
    nan_safe: bool
    dtype: Any
    spmd_axis_name: str | None
    method: Method
    memory_budget_bytes: int | None
    strict: bool

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(
                f"method={self.method!r} must be one of {', '.join(get_args(Method))}"
            )
        if isinstance(self.normalize_by, numbers.Real) and not self.normalize_by > 0:
            raise ValueError(f"normalize_by={self.normalize_by} must be > 0")
        budget = self.memory_budget_bytes
        if budget is not None and budget < 0:
            raise ValueError(
                f"memory_budget_bytes={budget} must be >= 0, or None for no limit"
            )
        if self.method == "reweight" and len(self.clipping.bounds) > 1:
            raise ValueError(
                "method='reweight' has one weight for each example, but l2_clip_norm "
                "names several groups: use method='bookkeeping'"
            )
        formed = self.pre_clipping_transform is not None
        if formed and self.method in ("bookkeeping", "reweight"):
            raise ValueError(
                f"method={self.method!r} forms no per-example gradient that "
                "pre_clipping_transform could take: use method='vmap' or 'auto'"
            )

    @property
    def has_aux(self) -> bool:
        return self.convention.has_aux or self.return_values or self.return_grad_norms

    @property
    def is_normalized(self) -> bool:
        is_static = isinstance(self.normalize_by, numbers.Real)
        return not is_static or self.normalize_by != 1

    def vmap(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(fun, spmd_axis_name=self.spmd_axis_name)

    def clip(self, gradient: PyTree) -> PyTree:
        """What one example contributes, given its gradient."""
        if self.pre_clipping_transform is not None:
            gradient = self.pre_clipping_transform(gradient)
        if self.dtype is not None:
            gradient = jax.tree.map(lambda x: x.astype(self.dtype), gradient)
        return self.clipping.clip(gradient, nan_safe=self.nan_safe)

    def settle(self, call: Call) -> methods.Settled:
        """The method that a call goes by."""
        return methods.settle(
            call,
            self.method,
            must_form=self.pre_clipping_transform is not None,
            is_one_group=len(self.clipping.bounds) == 1,
            num_examples=self.microbatch_size or call.batch_size,
            memory_budget_bytes=self.memory_budget_bytes,
            strict=self.strict,
        )


def clipped_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: PyTree,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Callable[[PyTree], PyTree] | None = None,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
    method: Method = "auto",
    memory_budget_bytes: int | None = None,
    strict: bool = False,
) -> ClippedGrad:
    """Makes a function that sums clipped per-example gradients of `fun`.

    A drop-in for `jax_privacy.clipped_grad` (2.0.0) at close to the cost of an ordinary
    gradient: per-example gradients g_i are not formed, their norms n_i come from what
    meets at each parameter's use (`dpjax.tapped_function`), and

        sum_i s_i g_i,    s_i = min(1, l2_clip_norm / n_i)

    from the same backward pass. Lee & Kifer 2021, section 4 (reweighting); Bu et al.
    2023 (book-keeping).

    `fun` is any JAX function of one example: it is traced with a batch of one. What
    mixes examples (batch normalisation in training mode, contrastive losses) thereby
    becomes another model. Batch statistics with Flax's names among the parameters or in
    the aux are an error. The rest cannot be seen from one example and raises none: ask
    `dpjax.require_separable`.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda w, x: 0.5 * jnp.mean((x @ w) ** 2)
      >>> grad_fn = clipped_grad(loss, l2_clip_norm=1.0, return_grad_norms=True)
      >>> total, aux = grad_fn(jnp.ones(2), jnp.array([[3.0, 4.0], [0.1, 0.0]]))
      >>> [round(float(norm), 2) for norm in aux.grad_norms]
      [35.0, 0.01]
      >>> [round(float(entry), 2) for entry in total]
      [0.61, 0.8]

    Args:
      fun: returns a scalar loss, or `(loss, aux)` with `has_aux`.
      argnums: the argument(s) with the parameters; floating point leaves only.
      has_aux: whether `fun` returns aux beside the loss.
      l2_clip_norm: largest L2 norm of an example's gradient. Or a pytree prefix of the
        parameters (for a tuple of argnums, of their tuple): then each group of leaves
        is clipped to its own norm. May be traced. See `dpjax.clip_factors.Clipping` for
        0, infinity and negative values.
      rescale_to_unit_norm: divide each clipped gradient by its clip norm, so that the
        bound is 1 (De et al. 2022, arXiv 2204.13650).
      normalize_by: divide the sum by this constant. Never by the number of examples
        that happened to be drawn: that number is private.
      batch_argnums: the argument(s) whose arrays hold examples along axis 0.
      keep_batch_dim: whether `fun` sees an example with a batch axis of length one, or
        without that axis. Without it, further axes make groups: each row of the batch
        is clipped as one user.
      return_values: also return each example's loss.
      return_grad_norms: also return each example's gradient norm before clipping.
      pre_clipping_transform: applied to each example's gradient pytree before clipping.
        It needs the gradient formed, so method "auto" is then "vmap".
      microbatch_size: process the batch in parts of this size, one after another; must
        divide it. Trailing parts that are all padding are skipped.
      nan_safe: replace NaN and infinite entries of an example's gradient by zero before
        clipping. Without it they reach the sum, and no bound holds.
      dtype: of the sum; None for the parameters' own.
      prng_argnum: an argument with a PRNG key, split to give each example its own.
      spmd_axis_name: see `jax.vmap`.
      method: "bookkeeping" (one backward pass; keeps every activation and cotangent),
        "reweight" (two backward passes; keeps what an ordinary one keeps, `remat`
        included), "vmap" (forms all per-example gradients), or "auto": book-keeping,
        but reweighting where `fun` holds `remat` or the memory budget asks for it. See
        `dpjax.methods.settle` for exceptions.
      memory_budget_bytes: what clipping may keep beyond the ordinary backward pass, for
        the examples that are processed at once: it decides between the ways to compute
        a norm, and for method "auto" between methods. An estimate, not a limit that is
        enforced. None for the fastest.
      strict: raise ValueError, naming the parameters, if any needs per-example
        gradients formed because no norm rule covers its use. See `dpjax.explain`.

    Returns:
      A function of `fun`'s arguments. Keyword arguments are mapped over axis 0, without
      an added axis. `is_padding_example`, bool[B], marks rows that contribute nothing.
      It returns the sum, a pytree like the parameters, or `(sum, Aux)` if anything else
      was asked for. The values in `Aux` are per example and not private.

    Raises:
      ValueError: wrong arguments, at once or when called; batch statistics.
      TypeError: integer parameters, or a loss that is no floating point scalar.
    """
    settings = _Settings(
        Convention(fun, argnums, has_aux, batch_argnums, keep_batch_dim, prng_argnum),
        Clipping(l2_clip_norm, rescale_to_unit_norm),
        normalize_by,
        return_values,
        return_grad_norms,
        pre_clipping_transform,
        microbatch_size,
        nan_safe,
        dtype,
        spmd_axis_name,
        method,
        memory_budget_bytes,
        strict,
    )
    bound = settings.clipping.norm_bound() / normalize_by
    return ClippedGrad(
        functools.partial(_clipped_grad, settings), bound, settings.has_aux
    )


def per_example_grad_norms(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    prng_argnum: int | None = None,
    spmd_axis_name: str | None = None,
    strict: bool = False,
    **kwargs: Any,
) -> Any:
    """L2 norms of per-example gradients, without forming the gradients.

    The first half of Lee & Kifer 2021, on its own: one forward and one backward pass.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda w, x: jnp.sum(x @ w)
      >>> per_example_grad_norms(loss)(jnp.ones(2), jnp.array([[3.0, 4.0]]))
      Array([5.], dtype=float32)
      >>> per_example_grad_norms(loss, jnp.ones(2), jnp.array([[3.0, 4.0]]))
      Array([5.], dtype=float32)

    Args:
      fun: as for `clipped_grad`, as are the keyword arguments.
      *args: `fun`'s arguments; without any, a function that takes them is returned.
      argnums: see `clipped_grad`.
      has_aux: see `clipped_grad`; the aux is dropped.
      batch_argnums: see `clipped_grad`.
      keep_batch_dim: see `clipped_grad`.
      prng_argnum: see `clipped_grad`.
      spmd_axis_name: see `clipped_grad`.
      strict: see `clipped_grad`.
      **kwargs: `fun`'s keyword arguments, mapped over axis 0.

    Returns:
      float32[B] (float64 where the gradient is), not private. NaN or infinite where the
      gradient is.
    """
    grad_fn = clipped_grad(
        fun,
        argnums,
        has_aux,
        l2_clip_norm=math.inf,
        batch_argnums=batch_argnums,
        keep_batch_dim=keep_batch_dim,
        return_grad_norms=True,
        prng_argnum=prng_argnum,
        spmd_axis_name=spmd_axis_name,
        strict=strict,
    )

    def norms_fn(*args: Any, **kwargs: Any) -> jax.Array:
        return grad_fn(*args, **kwargs)[1].grad_norms

    return norms_fn(*args, **kwargs) if args else norms_fn


def _clipped_grad(
    settings: _Settings,
    *args: Any,
    is_padding_example: jax.Array | None = None,
    **kwargs: Any,
) -> Any:
    call = settings.convention.bind(args, kwargs)
    is_padding = _checked_mask(is_padding_example, call.batch_size)
    result = _sum_batch(settings, call, is_padding)
    total = result.total
    if settings.is_normalized:
        total = jax.tree.map(lambda x: x / settings.normalize_by, total)
    if not settings.has_aux:
        return total
    aux = Aux(
        result.values if settings.return_values else None,
        result.norms if settings.return_grad_norms else None,
        result.aux if settings.convention.has_aux else None,
    )
    if settings.convention.keep_batch_dim:
        aux = jax.tree.map(_without_kept_axis, aux)
    return total, aux


def _without_kept_axis(array: jax.Array) -> jax.Array:
    """Drops the batch axis of length one that `fun` saw and may have returned."""
    return array[:, 0] if array.ndim >= 2 and array.shape[1] == 1 else array


def _checked_mask(mask: Any, batch_size: int) -> jax.Array:
    if mask is None:
        return jnp.zeros(batch_size, bool)
    mask = jnp.asarray(mask)
    is_flag = jnp.issubdtype(mask.dtype, jnp.integer) or mask.dtype == bool
    if mask.shape != (batch_size,) or not is_flag:
        raise ValueError(
            f"is_padding_example is {mask.dtype}{list(mask.shape)}, but must be "
            f"bool[{batch_size}]: one entry for each example"
        )
    return mask.astype(bool)


def _sum_batch(settings: _Settings, call: Call, is_padding: jax.Array) -> ClippedBatch:
    method, traced = settings.settle(call)

    def sum_part(examples: list[jax.Array], is_padding: jax.Array) -> ClippedBatch:
        if traced is None:
            return per_example.clipped_sum(
                call, examples, is_padding, settings.clip, settings.vmap
            )
        return _sum_by_taps(settings, method, call, traced, examples, is_padding)

    size = settings.microbatch_size
    if size is None or call.batch_size == 0:
        return sum_part(call.examples, is_padding)
    kinds = optax.microbatching.AccumulationType
    return optax.microbatching.microbatch(
        sum_part,
        argnums=(0, 1),
        microbatch_size=size,
        accumulator=ClippedBatch(kinds.SUM, kinds.CONCAT, kinds.CONCAT, kinds.CONCAT),
        num_real_microbatches=_real_microbatches(is_padding, size),
    )(call.examples, is_padding)


def _real_microbatches(is_padding: jax.Array, size: int) -> jax.Array:
    """Number of microbatches up to the last with a real example, at least 1."""
    parts = optax.microbatching.reshape_batch_axis(is_padding, size)
    is_real = ~jnp.all(parts, axis=1)
    last = jnp.max(jnp.where(is_real, jnp.arange(is_real.shape[0]), 0))
    return last + 1


def _sum_by_taps(
    settings: _Settings,
    method: Method,
    call: Call,
    traced: Traced,
    examples: list[jax.Array],
    is_padding: jax.Array,
) -> ClippedBatch:
    anchor = jnp.zeros(is_padding.shape, jnp.float32)
    inputs = [anchor, *examples]
    function, components = traced.function, traced.components
    plan = None
    if method == "reweight":
        plan = reweighting.plan(function, components)
        components = plan.local.rest
        records = recording.record(
            function, call.leaves, inputs, settings.vmap, plan.local, plan.chosen
        )
    else:
        records = recording.record(function, call.leaves, inputs, settings.vmap)
    norms = bookkeeping.squared_norms(records, components)
    groups = settings.clipping.groups(
        jax.tree.unflatten(call.parameter_tree, call.leaves)
    )
    squared = _group_norms(norms.squared, groups, settings.clipping, anchor)
    if records.local is not None:  # One group, since it is reweighting.
        squared = [_sum_norms([*squared, records.local])]
    is_uncertain = _is_uncertain(
        squared, settings.clipping, is_reported=settings.return_grad_norms
    )
    # An infinite norm leaves an example out: its factor is 0.
    left_out = is_padding | is_uncertain
    factors = settings.clipping.factors(
        [jnp.where(left_out, jnp.inf, jnp.sqrt(_upper(norm))) for norm in squared]
    )
    if plan is not None:
        leaves = reweighting.weighted_sum(plan, records, norms, factors[0])
        # One gradient that is not finite spoils the second pass: then none is taken
        # from it.
        is_spoilt = ~jnp.all(jnp.isfinite(_upper(squared[0])))
        leaves = [jnp.where(is_spoilt, jnp.zeros_like(x), x) for x in leaves]
        is_uncertain |= is_spoilt
    else:
        weights = [factors[group] for group in groups]
        leaves = bookkeeping.weighted_sum(records, components, norms, weights)
    form: Callable[[jax.Array], list[jax.Array]]
    if plan is not None or any(tap.loops for tap in function.taps):
        # From the start: nothing must be kept for it, and what loops stacked is laid
        # out by steps, not by examples, so that reading it here would copy it.
        form = functools.partial(per_example.gradient, call, examples)
    else:
        form = functools.partial(
            bookkeeping.example_gradient, records, components, norms.gradients
        )
    if settings.dtype is not None:
        leaves = [leaf.astype(settings.dtype) for leaf in leaves]
    added = per_example.add_one_by_one(
        per_example.ExactlyAdded(
            jax.tree.unflatten(call.parameter_tree, leaves),
            jnp.sqrt(jnp.maximum(_sum_norms(squared).value, 0)),
        ),
        is_uncertain & ~is_padding,
        lambda index: jax.tree.unflatten(call.parameter_tree, form(index)),
        settings.clip,
    )
    loss, *aux = records.outputs
    return ClippedBatch(
        added.total, loss, added.norms, jax.tree.unflatten(traced.aux_tree, aux)
    )


def _upper(norm: SquaredNorm) -> jax.Array:
    """The largest that a squared norm may be."""
    return jnp.maximum(norm.value, 0) + norm.rounding


def _group_norms(
    squared: Sequence[SquaredNorm],
    groups: Sequence[int],
    clipping: Clipping,
    zeros_B: jax.Array,
) -> list[SquaredNorm]:
    """Per-example squared norms of each clip group, from those of the leaves."""
    nothing = SquaredNorm(zeros_B, zeros_B)
    return [
        _sum_norms(
            [nothing] + [n for n, g in zip(squared, groups, strict=True) if g == k]
        )
        for k in range(len(clipping.bounds))
    ]


def _is_uncertain(
    squared: Sequence[SquaredNorm], clipping: Clipping, *, is_reported: bool
) -> jax.Array:
    """Which examples' norms are not finite, or too rounded to clip by or to report."""

    def in_group(norm: SquaredNorm, bound: Any) -> jax.Array:
        upper = _upper(norm)
        is_rounded = norm.rounding > _LARGEST_ROUNDING * norm.value
        matters = jnp.sqrt(upper) > bound
        if is_reported:
            matters |= norm.rounding > _LEAST_REPORTED
        return ~jnp.isfinite(upper) | (is_rounded & matters)

    flags = list(map(in_group, squared, clipping.bounds))
    return functools.reduce(jnp.logical_or, flags)


def _sum_norms(norms: Sequence[SquaredNorm]) -> SquaredNorm:
    dtype = wide_dtype(*(norm.value.dtype for norm in norms))
    value, rounding = (
        functools.reduce(jnp.add, (part.astype(dtype) for part in parts))
        for parts in zip(*norms, strict=True)
    )
    return SquaredNorm(value, rounding)

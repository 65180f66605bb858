"""Optax transforms that make an update private: Gaussian noise on a clipped sum.

Put one of them first in an `optax.chain`; whatever follows only processes what has
been released already:

* `privatize` takes the SUM of clipped per-example gradients, as `dpjax.clipped_grad`
  returns it, and gives the noisy MEAN.
* `clip_and_noise` takes per-example gradients, for loops that `jax.vmap` themselves.

Both divide by `normalize_by`, a constant that everyone may know: the *expected* batch
size. The size of the batch that was drawn is a secret of the data, and dividing by it
breaks the guarantee.

**Accumulating gradients.** The noise belongs to the logical batch and must be added
once to the sum over its micro-batches. With `optax.MultiSteps` around the whole chain
and `use_grad_mean=False` that is exactly what happens:

    optimizer = optax.MultiSteps(
        optax.chain(
            dpjax.privatize(
                noise_multiplier, sensitivity, normalize_by=expected_logical_batch_size,
                key=key,
            ),
            optax.adam(1e-3),
        ),
        every_k_schedule=k,
        use_grad_mean=False,
    )

A step of the accountant is then one logical batch, k calls of `update`. No transform
can see how it is wrapped, so three other ways to write this run and are wrong:

| composition | what comes out |
|---|---|
| default `use_grad_mean=True` | the signal is divided by k, the noise is not |
| the same, `normalize_by` divided by k | the right mean, with k times the noise |
| `chain(privatize(...), MultiSteps(optimizer, k))` | noise at every micro-batch: |
| | sqrt(k) times as much, and k steps of the accountant |

They do not leak, they lose accuracy. `clip_and_noise` cannot be accumulated: it adds
noise to every micro-batch, so clip with `dpjax.clipped_grad` instead.

Keys: two transforms with the same key draw the same noise, and the difference of their
outputs has none. Give every transform a key of its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import _compat
from dpjax.clip_factors import Clipping, squared_sum
from dpjax.precision import wide_dtype, widened

# Standard normals drawn at once for several leaves: 16 MiB of them.
_DRAW_SIZE = 2**22

_Leaves = list[tuple[Any, jax.Array]]


class PrivatizeState(NamedTuple):
    """State of `privatize` and `clip_and_noise`.

    A run that is resumed from a saved state draws the noise it would have drawn.

    Attributes:
      key: the key that was given. Step t draws from `jax.random.fold_in(key, t)`.
      step: i32[], the number of updates so far.
    """

    key: jax.Array
    step: jax.Array


def privatize(
    noise_multiplier: jax.typing.ArrayLike,
    sensitivity: jax.typing.ArrayLike,
    normalize_by: jax.typing.ArrayLike,
    key: jax.Array,
) -> optax.GradientTransformation:
    """Adds Gaussian noise to a sum of clipped gradients and divides it by a constant.

    The update u, a pytree, becomes

        (u + noise_multiplier * sensitivity * N(0, I)) / normalize_by

    (Abadi et al. 2016, arXiv:1607.00133, algorithm 1, with the expected batch size as
    the divisor). Noise is drawn and added in float32, or wider for wider leaves, and
    the result is cast to the leaf's dtype. With JAX's default random number generator
    the noise does not depend on how leaves are sharded.

    Under `optax.inject_hyperparams` the key in the state is the one that counts. Pass
    it `hyperparam_dtype=jnp.float32` if the parameters are narrower: a rounded noise
    multiplier is not the one accounted for, and raises. Under `optax.MultiSteps` see
    the module's docstring.

    Args:
      noise_multiplier: standard deviation of the noise on the sum, over `sensitivity`;
        finite and >= 0. This is what `dpjax.accounting` takes. May be a traced scalar.
      sensitivity: L2 norm by which one example changes the sum, finite and >= 0:
        `grad_fn.sensitivity()` of the `grad_fn` that `dpjax.clipped_grad` returned.
        May be a traced scalar.
      normalize_by: the divisor, finite and > 0: the expected batch size, never the
        size of the batch that was drawn. May be a traced scalar.
      key: a JAX key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`), that
        nothing else uses. Whoever knows it can subtract the noise, so it is never
        defaulted, and integers are refused, which end up in code and logs. Make one
        from the system's entropy, and keep it as secret as the data:
        `jax.random.wrap_key_data(np.frombuffer(os.urandom(8), np.uint32))`.

    Returns:
      An `optax.GradientTransformation` whose state is a `PrivatizeState`. The update
      keeps structure, shapes and dtypes; None and `optax.MaskedNode` keep their place.

    Raises:
      TypeError: `key` is not a JAX key, a number is not a scalar of at least float32,
        or, at the update, a leaf is not floating point.
      ValueError: a number that is not traced is out of its range or, at the update, a
        leaf differs from its parameter in shape (per-example gradients are for
        `clip_and_noise`) or varies over an axis of an enclosing `jax.shard_map` that
        the key does not vary over, so that all devices would draw the same noise.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> params = jnp.zeros(2)
      >>> optimizer = optax.chain(
      ...     privatize(0.0, 1.0, normalize_by=4, key=jax.random.key(0)),
      ...     optax.sgd(1.0),
      ... )
      >>> update, _ = optimizer.update(jnp.array([4.0, 8.0]), optimizer.init(params))
      >>> update.tolist()
      [-1.0, -2.0]
    """
    _check_number("noise_multiplier", noise_multiplier)
    _check_number("sensitivity", sensitivity)
    _check_divisor(normalize_by)
    _check_key(key)

    def update(
        updates: optax.Updates,
        state: PrivatizeState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, PrivatizeState]:
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        _check_floating(leaves)
        _check_shapes(leaves, params)
        sums = [leaf for _, leaf in leaves]
        noisy = _noisy_means(sums, state, noise_multiplier, sensitivity, normalize_by)
        noisy = [mean.astype(x.dtype) for mean, x in zip(noisy, sums, strict=True)]
        return jax.tree.unflatten(structure, noisy), state._replace(step=state.step + 1)

    return optax.GradientTransformation(_first_state(key), update)


def clip_and_noise(
    l2_clip_norm: Any,
    noise_multiplier: jax.typing.ArrayLike,
    normalize_by: jax.typing.ArrayLike,
    key: jax.Array,
) -> optax.GradientTransformation:
    """Clips per-example gradients, sums them, adds noise and divides by a constant.

    The per-example gradients g_1, ..., g_B, one pytree with a leading axis of length B
    on every leaf, become

        (sum_i min(1, C / |g_i|) g_i + noise_multiplier * C * N(0, I)) / normalize_by

    where C is `l2_clip_norm` and |g_i| the L2 norm over all leaves together. An example
    whose norm is not finite, by a NaN or an infinity anywhere, contributes nothing.
    With B = 0 only the noise remains. Norms, sum and noise are in float32, or wider for
    wider leaves.

    | `l2_clip_norm` | what comes out |
    |---|---|
    | 0 | zeros, also without noise, since nothing is released |
    | inf, `noise_multiplier` 0 | the plain sum over `normalize_by` |
    | inf, `noise_multiplier` > 0 | ValueError: no noise would be enough |

    Args:
      l2_clip_norm: L2 norm to which each example is clipped, >= 0; or, to clip groups
        of leaves on their own, a pytree prefix of the gradients with a norm for each
        group, and C in the noise is then the root of their sum of squares.
      noise_multiplier: as in `privatize`.
      normalize_by: as in `privatize`.
      key: as in `privatize`.

    Returns:
      An `optax.GradientTransformation` whose state is a `PrivatizeState`; the update
      loses the leading axis and keeps the rest.

    Raises:
      TypeError: as for `privatize`.
      ValueError: as for `privatize`; an infinite `l2_clip_norm` with noise; or, at the
        update, a leaf without a leading axis, or leaves that disagree in its length.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> transform = clip_and_noise(1.0, 0.0, normalize_by=2, key=jax.random.key(0))
      >>> gradients = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5]])}  # Norms 5 and 0.5.
      >>> update, _ = transform.update(gradients, transform.init(None))
      >>> [round(x, 3) for x in update["w"].tolist()]
      [0.3, 0.65]
    """
    clipping = Clipping(l2_clip_norm)
    for bound in clipping.bounds:
        _check_number("l2_clip_norm", bound, finite=False)
    _check_number("noise_multiplier", noise_multiplier)
    _check_divisor(normalize_by)
    _check_key(key)
    unclipped = math.inf in [_concrete(bound) for bound in clipping.bounds]
    if unclipped and _concrete(noise_multiplier) != 0:
        raise ValueError(
            f"l2_clip_norm={l2_clip_norm} with noise_multiplier={noise_multiplier}: no "
            "noise hides an unclipped gradient; give a finite l2_clip_norm"
        )
    sensitivity = 0.0 if unclipped else clipping.norm_bound()

    def update(
        updates: optax.Updates,
        state: PrivatizeState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, PrivatizeState]:
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        _check_floating(leaves)
        _check_batch_axes(leaves)
        _check_shapes(leaves, params, batch_axes=1)
        sums = _clipped_sums(clipping, updates)
        noisy = _noisy_means(sums, state, noise_multiplier, sensitivity, normalize_by)
        noisy = [
            mean.astype(leaf.dtype)
            for mean, (_, leaf) in zip(noisy, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, noisy), state._replace(step=state.step + 1)

    return optax.GradientTransformation(_first_state(key), update)


def _first_state(key: jax.Array) -> Callable[[optax.Params], PrivatizeState]:
    def init(params: optax.Params) -> PrivatizeState:
        del params
        return PrivatizeState(key=key, step=jnp.zeros((), jnp.int32))

    return init


def _clipped_sums(clipping: Clipping, gradients: optax.Updates) -> list[jax.Array]:
    leaves = list(map(widened, jax.tree.leaves(gradients)))
    groups = clipping.groups(gradients)
    dtype = wide_dtype(*(leaf.dtype for leaf in leaves))
    squares = [jax.vmap(squared_sum)(leaf).astype(dtype) for leaf in leaves]
    norms = [
        jnp.sqrt(
            sum(
                (s for s, g in zip(squares, groups, strict=True) if g == group),
                start=jnp.zeros(leaves[0].shape[0], dtype),
            )
        )
        for group in range(len(clipping.bounds))
    ]
    factors = clipping.factors(norms)
    finite = jnp.all(jnp.isfinite(jnp.stack(norms)), axis=0)

    def clipped_sum(x: jax.Array, group: int) -> jax.Array:
        per_example = (x.shape[0],) + (1,) * (x.ndim - 1)
        factor = factors[group].astype(x.dtype).reshape(per_example)
        # Not by multiplication: 0 * NaN is NaN.
        return jnp.sum(jnp.where(finite.reshape(per_example), x * factor, 0), axis=0)

    return [clipped_sum(x, group) for x, group in zip(leaves, groups, strict=True)]


def _noisy_means(
    sums: list[jax.Array],
    state: PrivatizeState,
    noise_multiplier: jax.typing.ArrayLike,
    sensitivity: jax.typing.ArrayLike,
    normalize_by: jax.typing.ArrayLike,
) -> list[jax.Array]:
    """Returns (sum + noise) / normalize_by for every leaf, in at least float32."""
    for x in sums:
        _check_device_axes(x, state.key)
    step_key = jax.random.fold_in(state.key, state.step)

    def mean(x: jax.Array, normal: jax.Array | None) -> jax.Array:
        dtype = wide_dtype(x.dtype)
        x = x.astype(dtype)
        if normal is not None:
            scale = jnp.asarray(noise_multiplier, dtype)
            x = x + scale * jnp.asarray(sensitivity, dtype) * normal
        return x / jnp.asarray(normalize_by, dtype)

    if _concrete(noise_multiplier) == 0:
        return [mean(x, None) for x in sums]
    return list(map(mean, sums, _standard_normals(step_key, sums)))


def _standard_normals(key: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Independent standard normals shaped like the leaves, in at least float32.

    Small leaves share one draw, since every draw takes about half a second to compile;
    large ones have their own, so that no temporary array is larger than a leaf.
    """
    draws: list[list[int]] = []
    for i, leaf in enumerate(like):
        fits = draws and sum(like[j].size for j in draws[-1]) + leaf.size <= _DRAW_SIZE
        if fits and wide_dtype(like[draws[-1][0]].dtype) == wide_dtype(leaf.dtype):
            draws[-1].append(i)
        else:
            draws.append([i])
    normals: list[jax.Array] = []
    for draw_key, draw in zip(jax.random.split(key, len(draws)), draws, strict=True):
        sizes = [like[i].size for i in draw]
        flat = jax.random.normal(
            draw_key, (sum(sizes),), wide_dtype(like[draw[0]].dtype)
        )
        parts = jnp.split(flat, np.cumsum(sizes)[:-1])
        normals += [
            part.reshape(like[i].shape) for i, part in zip(draw, parts, strict=True)
        ]
    return normals


def _concrete(value: Any) -> float | None:
    """Returns the value of a number, None if it is traced."""
    return None if isinstance(value, jax.core.Tracer) else float(value)


def _check_number(name: str, value: Any, *, finite: bool = True) -> None:
    if not isinstance(value, int | float | np.number | np.ndarray | jax.Array):
        raise TypeError(f"{name}={value!r}: expected a number")
    if jnp.shape(value) != ():
        raise TypeError(f"{name} has shape {jnp.shape(value)}: expected a scalar")
    dtype = jnp.result_type(value)
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"{name} is {dtype}: expected a real number")
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"{name} is {dtype}, which rounds it to another value than is accounted "
            "for: give a Python float or float32 (hyperparam_dtype=jnp.float32 in "
            "optax.inject_hyperparams)"
        )
    number = _concrete(value)
    if number is None:
        return
    if not number >= 0 or (finite and number == math.inf):
        raise ValueError(
            f"{name}={number}: expected {'a finite ' if finite else ''}{name} >= 0"
        )


def _check_divisor(normalize_by: Any) -> None:
    _check_number("normalize_by", normalize_by)
    if _concrete(normalize_by) == 0:
        raise ValueError(
            "normalize_by=0: expected normalize_by > 0, the expected batch size, or 1 "
            "to keep the sum"
        )


def _check_key(key: Any) -> None:
    remedy = (
        "expected a JAX key that is secret and used for nothing else, such as "
        "jax.random.wrap_key_data(np.frombuffer(os.urandom(8), np.uint32))"
    )
    if key is None:
        raise TypeError(
            "key=None: there is no default, since noise from a known key can be "
            f"subtracted; {remedy}"
        )
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(
            f"key is of type {type(key).__name__}, and seeds end up in code and logs, "
            f"where noise can be subtracted; {remedy}"
        )
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise TypeError(f"key has shape {key.shape}: expected one key; {remedy}")
    elif key.dtype != jnp.uint32 or key.ndim != 1:
        raise TypeError(f"key is {key.dtype}{list(key.shape)}; {remedy}")


def _check_floating(leaves: _Leaves) -> None:
    for path, leaf in leaves:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"updates{_at(path)} is {dtype}: expected floating-point gradients; "
                "leave other leaves out, as None or with optax.masked"
            )


def _check_shapes(
    leaves: _Leaves, params: optax.Params | None, batch_axes: int = 0
) -> None:
    shapes = {
        path: jnp.shape(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    for path, leaf in leaves:
        shape = leaf.shape[batch_axes:]
        if shape != shapes.get(path, shape):
            raise ValueError(
                f"updates{_at(path)} has shape {leaf.shape}, its parameter "
                f"{shapes[path]}: privatize takes a sum of gradients over examples, "
                "clip_and_noise per-example gradients with a leading batch axis"
            )


def _check_batch_axes(leaves: _Leaves) -> None:
    if not leaves:
        raise ValueError("updates holds no array: expected per-example gradients")
    sizes: dict[int, Any] = {}
    for path, leaf in leaves:
        if leaf.ndim == 0:
            raise ValueError(
                f"updates{_at(path)} is a scalar: expected per-example gradients with "
                "a leading batch axis; privatize takes their clipped sum"
            )
        sizes.setdefault(leaf.shape[0], path)
    if len(sizes) > 1:
        found = ", ".join(f"{size} at updates{_at(p)}" for size, p in sizes.items())
        raise ValueError(
            f"updates have different batch sizes, {found}: expected per-example "
            "gradients with one leading batch axis"
        )


def _check_device_axes(leaf: jax.Array, key: jax.Array) -> None:
    """Refuses noise that would be the same on all devices of a `jax.shard_map`."""
    same = _compat.varying_axes(leaf) - _compat.varying_axes(key)
    if same:
        raise ValueError(
            f"updates differ over the shard_map axes {sorted(map(str, same))} but key "
            "does not, so every device would draw the same noise: call the transform "
            "outside shard_map, or sum updates over the axes first"
        )


def _at(path: Any) -> str:
    return jax.tree_util.keystr(path)

"""Operations whose per-example parameter gradient is no larger than their output.

Biases, scales, learned positions, a class token concatenated to the data: the gradient
of the parameter operand is the cotangent itself, scaled, selected or cut. Summing it
over the axes along which the parameter was broadcast costs one pass over the cotangent,
which is as cheap as a norm can be; these are no fallback.
"""

from jax.extend.core import primitives as p

PRIMITIVES = frozenset(
    {
        p.add_p,
        p.add_jaxvals_p,
        p.atan2_p,
        p.clamp_p,
        p.concatenate_p,
        p.div_p,
        p.dynamic_update_slice_p,
        p.max_p,
        p.min_p,
        p.mul_p,
        p.pad_p,
        p.pow_p,
        p.rem_p,
        p.select_n_p,
        p.sub_p,
    }
)

# Those whose gradient is a sum of terms cotangent * (another operand, 1, -1 or 0).
LINEAR = frozenset(
    {
        p.add_p,
        p.add_jaxvals_p,
        p.concatenate_p,
        p.mul_p,
        p.pad_p,
        p.select_n_p,
        p.sub_p,
    }
)

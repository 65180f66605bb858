"""Private training at the speed of ordinary training, for any JAX function."""

from dpjax import accounting
from dpjax.clipping import Aux, ClippedGrad, clipped_grad, per_example_grad_norms
from dpjax.explaining import explain
from dpjax.separability import require_separable
from dpjax.transforms import clip_and_noise, privatize

__all__ = [
    "Aux",
    "ClippedGrad",
    "accounting",
    "clip_and_noise",
    "clipped_grad",
    "explain",
    "per_example_grad_norms",
    "privatize",
    "require_separable",
]

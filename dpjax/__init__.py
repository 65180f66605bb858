"""Private training at the speed of ordinary training, for any JAX function."""

from dpjax.clipping import Aux, ClippedGrad, clipped_grad, per_example_grad_norms

__all__ = ["Aux", "ClippedGrad", "clipped_grad", "per_example_grad_norms"]

"""Private training at the speed of ordinary training, for any JAX function."""

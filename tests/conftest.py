"""Settings that every test runs under: strict JAX, and two devices on the CPU."""

import os

# Before JAX starts: sharded programs are tested on two fake devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "agg"

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation dominates the first example, so a deadline would only measure that.
hypothesis.settings.register_profile("dpjax", deadline=None, print_blob=True)
hypothesis.settings.load_profile("dpjax")

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


def _set(values):
    # The cache looks at its settings once, at the first compilation after a reset.
    compilation_cache.reset_cache()
    for name, value in values.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Keeps compiled programs on disk, for modules that start one run many times."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    _set(settings)
    yield
    _set(before)


@pytest.fixture(scope="module")
def compiled_cheaply():
    """Compiles sooner, to slower programs, for modules that run each a few times."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

"""What a time was measured on."""

import os
import pathlib
import platform
from importlib import metadata
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "jax-privacy", "flax", "optax", "numpy")


def describe() -> dict[str, Any]:
    """Names the processor, the devices, the versions, and how busy the machine is.

    `load_average` is that of the last minute: at the start of a quiet run it is well
    below the number of cores.
    """
    device = jax.devices()[0]
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "num_devices": jax.device_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

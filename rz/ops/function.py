"""How an op calls its autograd function."""

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply, or its forward alone where no gradient is recorded: apply costs as much as a small kernel."""
    if not torch.is_grad_enabled():
        return function.forward(*arguments)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    # As function.apply, which also binds the arguments to the signature of forward, for as long again.
    return super(torch.autograd.Function, function).apply(*torch._functorch.utils.unwrap_dead_wrappers(arguments))

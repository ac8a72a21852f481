"""AdamW as a function of flat dicts of tensors, and the gradient norm."""

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

_BLOCK = 1 << 15  # elements of which a float64 copy stays in a core's cache


@attrs.frozen(kw_only=True, eq=False)
class AdamWState:
    """What AdamW remembers. Fields never change.

    Args:
        step: >= 0. Updates applied.
        first, second: running means of the gradient and of its square, of the names and shapes of the parameters.
    """

    step: int
    first: dict[str, Tensor]
    second: dict[str, Tensor]


def adamw_init(params: Mapping[str, Tensor]) -> AdamWState:
    """The state before the first update: step 0 and zeros of the shape, dtype and device of each parameter."""
    zeros = lambda: {name: torch.zeros_like(tensor.detach()) for name, tensor in params.items()}
    return AdamWState(step=0, first=zeros(), second=zeros())


def adamw(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: AdamWState,
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    donate: bool = False,
    donate_params: bool = False,
) -> tuple[dict[str, Tensor], AdamWState]:
    """One update of AdamW, out of place unless donated.

        m' = m + (1 - beta1) (g - m)          v' = beta2 v + (1 - beta2) g^2        t' = t + 1
        x' = (1 - learning_rate * weight_decay) x
             - learning_rate / (1 - beta1^t') * m' / (sqrt(v') / sqrt(1 - beta2^t') + epsilon)

    in the order of operations of torch.optim.AdamW, whose bits it gives on a CPU.
    Args:
        params, grads: the same names; each gradient of the shape and dtype of its parameter.
        state: from adamw_init or the last update.
        learning_rate, weight_decay: >= 0.  betas: in [0, 1).  epsilon: > 0.
        donate: the caller gives state up: its tensors are overwritten and become those of the state returned.
        donate_params: likewise params; they must not require gradients.
    Returns: (parameters, state), the same bits donated or not. What is not donated does not change.
    Gradient: to params and grads, as a function.
    Edge cases: with learning_rate 0 the parameters come back as they are, every bit, and the state moves on.
    Raises: ValueError for names or shapes that disagree, or a number out of range; TypeError for dtypes that disagree.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be >= 0 and finite, got {value}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be in [0, 1), got {betas}")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    for role, tensors in (("grads", grads), ("state.first", state.first), ("state.second", state.second)):
        _check_like(role, tensors, params)
    names = list(params)
    x, g = list(params.values()), [grads[name] for name in names]
    step, (beta1, beta2) = state.step + 1, betas
    first, second = ([means[name] for name in names] for means in (state.first, state.second))
    if donate:
        torch._foreach_lerp_(first, g, 1 - beta1)
        torch._foreach_mul_(second, beta2)
    else:
        first = torch._foreach_lerp(first, g, 1 - beta1)
        second = torch._foreach_mul(second, beta2)
    torch._foreach_addcmul_(second, g, g, 1 - beta2)
    named = lambda tensors: dict(zip(names, tensors, strict=True))
    after = AdamWState(step=step, first=named(first), second=named(second))
    if learning_rate == 0:  # x - 0 * y is not x where x is -0.0
        return dict(params), after
    if weight_decay and donate_params:
        torch._foreach_mul_(x, 1 - learning_rate * weight_decay)
    elif weight_decay:
        x = torch._foreach_mul(x, 1 - learning_rate * weight_decay)
    rate, root = learning_rate / (1 - beta1**step), (1 - beta2**step) ** 0.5
    # One tensor at a time, so that the denominators of all never stand beside each other. sqrt / root is out of place:
    # torch.func would silently take the wrong root for its derivative.
    step_by = torch.Tensor.addcdiv_ if donate_params else torch.addcdiv
    new = [
        step_by(value, mean, (square.sqrt() / root).add_(epsilon), value=-rate)
        for value, mean, square in zip(x, first, second, strict=True)
    ]
    return named(new), after


def global_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm of all gradients together.

    Returns: [] float64; squares are added in float64. Not finite if a gradient is not. 0 for no gradient at all.
    """
    blocks = [block for grad in grads.values() for block in grad.flatten().split(_BLOCK)]
    if not blocks:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(blocks, 2, dtype=torch.float64)))


def clip_by_global_norm(grads: Mapping[str, Tensor], *, max_norm: float) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients scaled down together so that their norm is at most max_norm.

        g' = g * min(1, max_norm / norm)

    Args:
        max_norm: > 0.
    Returns: (gradients in new tensors, norm before clipping [] float64).
    Edge cases: a norm at most max_norm leaves every bit; a norm of inf or NaN makes every gradient 0 or NaN, so look
        at the norm.
    Raises: ValueError if max_norm <= 0.
    Source: Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be > 0, got {max_norm}")
    norm = global_norm(grads)
    scaled = torch._foreach_mul(list(grads.values()), (max_norm / norm).clamp(max=1))
    return dict(zip(grads, scaled, strict=True)), norm


def _check_like(role: str, tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    if tensors.keys() != params.keys():
        other = sorted(tensors.keys() ^ params.keys())[0]
        raise ValueError(f"{role} must have the names of params, got a difference at {other}")
    for name, tensor in tensors.items():
        if tensor.shape != params[name].shape:
            raise ValueError(f"{role} {name} must be {list(params[name].shape)}, got {list(tensor.shape)}")
        if tensor.dtype != params[name].dtype:
            raise TypeError(f"{role} {name} must be {params[name].dtype}, got {tensor.dtype}")

"""Log-probabilities by Triton kernels. Logits exist for a chunk of rows at a time; rows do not know of chunks."""

from typing import Any

import torch
from torch import Tensor

from rz.kernels import logprobs as kernels
from rz.ops.launch import Launch, aligned, cdiv, opaque
from rz.ops.triton_linear import product, product_to_weight, product_to_x

CHUNK_ELEMENTS = 1 << 28  # logits held at once; the head is read once a chunk
BLOCK = 4096
TARGETS = 128  # rows a program of target_logprobs


def launches(
    logits: Tensor,
    temperatures: Tensor,
    tops: Tensor,
    logs: Tensor,
    *,
    every: Tensor | None = None,
    targets: Tensor | None = None,
    chosen: Tensor | None = None,
    grad: Tensor | None = None,
) -> dict[str, Launch]:
    """By name: statistics of the rows into tops and logs; every logprob; those of targets into chosen; the gradient,
    which takes the place of the logits. Shapes as in rz.kernels.logprobs."""
    rows, columns = logits.shape
    shared = {"logits": logits, "temperatures": temperatures, "tops": tops, "logs": logs}
    grid = (rows, cdiv(columns, BLOCK))

    def make(kernel: Any, grid: tuple[int, ...], block: int = BLOCK, **more: Any) -> Launch:
        constants = {"COLUMNS": columns, "BLOCK": block}
        return Launch(kernel=kernel, grid=grid, arguments=shared | more, constants=constants, warps=8, stages=1)

    return {
        "statistics": make(kernels.row_statistics, (rows,)),
        "every": make(kernels.row_logprobs, grid, out=every),
        "chosen": make(
            kernels.target_logprobs, (cdiv(rows, TARGETS),), TARGETS, targets=targets, out=chosen, rows=rows
        ),
        "gradient": make(kernels.logits_gradient, grid, targets=targets, grad=grad, out=logits),
    }


def _run(logits: Tensor, temperature: float | Tensor, last: str, **tensors: Tensor) -> None:
    rows, device = logits.shape[0], logits.device
    if isinstance(temperature, Tensor):
        temperatures = aligned(temperature.to(device, torch.float32).expand(rows))
    else:  # filled on the device: a graph cannot capture a copy from the host
        temperatures = torch.full((rows,), temperature, dtype=torch.float32, device=device)
    tops, logs = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    made = launches(logits, temperatures, tops, logs, **tensors)
    made["statistics"].run()
    made[last].run()


def tempered_logprobs(logits: Tensor, *, temperature: float | Tensor) -> Tensor:
    """As rz.ops.tempered_logprobs, without a gradient."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _run(aligned(logits), temperature, "every", every=out)
    return out


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(16, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, start + size) for start in range(0, rows, size)]


def _backward(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    to_hidden = torch.empty_like(hidden)
    to_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
    for rows in _chunks(hidden.shape[0], head.shape[0]):
        logits = product(hidden[rows], head, None)
        _run(logits, temperature, "gradient", targets=aligned(targets[rows]), grad=aligned(grad[rows]))
        to_logits = logits.to(head.dtype)
        to_hidden[rows] = product_to_x(to_logits, head).to(hidden.dtype)
        to_head += product_to_weight(to_logits, hidden[rows].to(head.dtype), torch.float32)
    return to_hidden, to_head.to(head.dtype)


class TokenLogprobs(torch.autograd.Function):
    """(hidden [N, E], head [V, E], targets [N] int64, temperature) -> [N] float32."""

    @staticmethod
    def forward(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> Tensor:
        out = []
        for rows in _chunks(hidden.shape[0], head.shape[0]):
            logits = product(hidden[rows], head, None)
            chosen = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
            _run(logits, temperature, "chosen", targets=aligned(targets[rows]), chosen=chosen)
            out.append(chosen)
        return torch.cat(out) if out else hidden.new_empty(0, dtype=torch.float32)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        hidden, head, targets, ctx.temperature = inputs
        ctx.save_for_backward(hidden, head, targets)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return *opaque(_backward, *ctx.saved_tensors, ctx.temperature, grad), None, None

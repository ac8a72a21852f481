"""Log-probabilities of the tokens of whole sequences, as the learner and every audit compute them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rz.batch import TrainBatch
from rz.models.compute import compute_params
from rz.models.dense import DenseConfig, forward, head_weight
from rz.ops import WholeSequences, token_logprobs


def packed_logprobs(
    params: Mapping[str, Tensor],
    config: DenseConfig,
    tokens: Tensor,
    lengths: Sequence[int],
    rows: Tensor,
    *,
    temperature: float,
) -> Tensor:
    """The logprob of the token that follows each of `rows`, over sequences packed one after the other.

    Shapes: N tokens in all, M rows.
    Args:
        params: as compute_params returns them.
        tokens: [N] int64.  lengths: tokens of each sequence; their sum is N.
        rows: [M] int64 places in tokens; none may be the last of its sequence.
    Returns: [M] float32, nats, of the tempered distribution; the bits that an engine reports for the same prefix.
    Gradient: to params.
    """
    positions = torch.cat([torch.arange(length) for length in lengths]).to(tokens.device)
    hidden = forward(params, config, tokens, positions, WholeSequences(lengths))
    return token_logprobs(hidden[rows], head_weight(params), tokens[rows + 1], temperature=temperature)


def response_logprobs(
    params: Mapping[str, Tensor], config: DenseConfig, batch: TrainBatch, *, dtype: torch.dtype
) -> Tensor:
    """The current policy's logprob of every sampled token of a batch.

    Padding is removed before the forward: packed equals unpacked bit for bit.

    Args:
        params: float32 masters, on the device to compute on.
        batch: B responses, T positions; its temperature divides the logits.
        dtype: of the activations, as the engine's.
    Returns: [B, T] float32, nats; 0 where mask is False.
    Gradient: to params.
    Edge cases: a response without tokens gives a row of zeros.
    """
    prompt = torch.arange(batch.prompt_ids.shape[1])[None, :] < batch.prompt_lengths[:, None]
    both = torch.cat((batch.prompt_ids, batch.response_ids), 1)
    real = torch.cat((prompt, batch.mask), 1)
    sampled = torch.cat((torch.zeros_like(prompt), batch.mask), 1)[real]
    rows = sampled.nonzero()[:, 0] - 1
    device = next(iter(params.values())).device
    logprobs = packed_logprobs(
        compute_params(params, dtype=dtype),
        config,
        both[real].to(device),
        real.sum(1).tolist(),
        rows.to(device),
        temperature=batch.temperature,
    )
    return torch.zeros(batch.mask.shape, dtype=torch.float32).masked_scatter(batch.mask, logprobs.to(batch.mask.device))

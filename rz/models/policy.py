"""Log-probabilities of the tokens of whole sequences, as the learner and every audit compute them."""

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from rz.batch import TrainBatch
from rz.models.compute import compute_params
from rz.models.dense import DenseConfig, forward, head_weight
from rz.ops import WholeSequences, token_logprobs
from rz.ops import device as device_of


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


@attrs.frozen(kw_only=True, eq=False)
class Packed:
    """The responses of a batch without padding, prompts that several share once. N tokens, M sampled tokens.

    tokens, positions: [N] int64.  lengths, prefixes: as WholeSequences takes them.
    rows: [M] int64, the token after which each sampled token was drawn, in order of the batch.  targets: [M] int64.
    """

    tokens: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...]
    rows: Tensor
    targets: Tensor


def _array(x: Tensor) -> np.ndarray:
    """x as it is, or where torch.func is at work, whose tensors have no memory to share, a copy as int64 or bool."""
    if torch._C._are_functorch_transforms_active():
        return np.array(x.tolist(), dtype=bool if x.dtype == torch.bool else np.int64)
    return x.numpy()


def pack(batch: TrainBatch, *, share: bool = True) -> Packed:
    """Pack the responses of a batch: those of one group with equal prompts follow one copy of the prompt, if shared.

    The last token of a response predicts nothing and is left out.
    """
    prompt_ids, response_ids, mask = map(_array, (batch.prompt_ids, batch.response_ids, batch.mask))
    prompts = [ids[:count] for ids, count in zip(prompt_ids, batch.prompt_lengths.tolist(), strict=True)]
    keys = [(group, prompt.tobytes()) for group, prompt in zip(batch.group_ids.tolist(), prompts, strict=True)]
    members = Counter(keys)
    tokens: list[np.ndarray] = []
    positions, rows = [], []  # runs
    sequences: list[tuple[int, int | None]] = []  # length, prefix
    shared: dict[tuple[int, bytes], tuple[int, int]] = {}  # the sequence of a prompt, its last row
    total = 0  # tokens packed so far

    def append(ids: Sequence[np.ndarray], first_position: int, prefix: int | None) -> int:
        """Pack one more sequence; returns the place after its last token."""
        length = sum(map(len, ids))
        tokens.extend(ids)
        positions.append(np.arange(first_position, first_position + length))
        sequences.append((length, prefix))
        return total + length

    for key, prompt, ids, kept in zip(keys, prompts, response_ids, mask, strict=True):
        sampled = ids[kept]
        response, count = sampled[:-1], len(sampled)
        if members[key] == 1 or not share:
            total = append((prompt, response), 0, None)
            rows.append(np.arange(total - count, total) if count else np.arange(0))
            continue
        if key not in shared:
            total = append((prompt,), 0, None)
            shared[key] = len(sequences) - 1, total - 1
        sequence, last = shared[key]
        if count:
            rows.append(np.arange(last, last + 1))
        if count > 1:
            start, total = total, append((response,), len(prompt), sequence)
            rows.append(np.arange(start, total))
    lengths, prefixes = zip(*sequences, strict=True)
    join = lambda runs: torch.from_numpy(np.concatenate(runs))
    return Packed(
        tokens=join(tokens),
        positions=join(positions),
        lengths=lengths,
        prefixes=prefixes,
        rows=join(rows) if rows else torch.zeros(0, dtype=torch.int64),
        targets=batch.response_ids[batch.mask],
    )


def response_logprobs(
    params: Mapping[str, Tensor], config: DenseConfig, batch: TrainBatch, *, dtype: torch.dtype
) -> Tensor:
    """The current policy's logprob of every sampled token of a batch.

    Padding is removed before the forward, and a prompt that responses of a group share is computed once: packed and
    shared equal unpacked bit for bit.

    Args:
        params: float32 masters, on the device to compute on.
        batch: B responses, T positions; its temperature divides the logits.
        dtype: of the activations, as the engine's.
    Returns: [B, T] float32, nats; 0 where mask is False.
    Gradient: to params.
    Edge cases: a response without tokens gives a row of zeros.
    """
    used, first = compute_params(params, dtype=dtype), next(iter(params.values()))
    packed, device = pack(batch, share=not device_of.has_kernels(first)), first.device
    past = WholeSequences(packed.lengths, packed.prefixes)
    hidden = forward(used, config, packed.tokens.to(device), packed.positions.to(device), past)
    # index_select: the gradient of hidden[rows] adds equal rows up in any order.
    read = hidden.index_select(0, packed.rows.to(device))
    logprobs = token_logprobs(read, head_weight(used), packed.targets.to(device), temperature=batch.temperature)
    return torch.zeros(batch.mask.shape, dtype=torch.float32).masked_scatter(batch.mask, logprobs.cpu())

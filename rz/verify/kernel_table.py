"""What every kernel needs of a device, read from ahead-of-time compiles: no device has to be there."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import attrs
import torch
import triton
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rz.ops.launch import Launch
from rz.ops.tiles import SHARED_LIMIT
from rz.verify.kernel_cases import kernel_cases

TOOL = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
ELEMENTS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
KINDS = ("q", "a", "x", "logits", "gate_up", "out")  # the first of these arguments names the dtype of a case


@attrs.frozen(kw_only=True)
class KernelRow:
    """One compiled kernel. Spills: instructions that reach local memory on NVIDIA, registers on AMD. Shared
    memory in bytes."""

    target: str
    kernel: str
    case: str
    dtype: str
    tile: str
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    shared_limit: int

    @property
    def name(self) -> str:
        return f"{self.target}: {self.kernel} {self.case}, {self.dtype}"

    def __str__(self) -> str:
        shape = f"{self.tile}, {self.warps} warps, {self.stages} stages"
        memory = f"{self.shared} of {self.shared_limit} B shared"
        return f"{shape}: {self.registers} registers, {self.spills} spills, {memory}"

    @property
    def fits(self) -> bool:
        return not self.spills and self.shared <= self.shared_limit


def _target(name: str) -> GPUTarget:
    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


def source_of(launch: Launch) -> ASTSource:
    """The very specialisation that Launch.run makes: see rz.ops.launch."""
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    aligned = {}
    for place, name in enumerate(launch.kernel.arg_names):
        value = launch.arguments.get(name)
        if name in launch.constants or value is None:
            signature[name], constants[name] = "constexpr", launch.constants.get(name)
        elif isinstance(value, Tensor):
            signature[name] = "*" + ELEMENTS[value.dtype]
            aligned[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    return ASTSource(launch.kernel, signature, constants, aligned)


def _nvidia_numbers(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        say = lambda what: subprocess.run([TOOL, what, file.name], capture_output=True, text=True, check=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", say("--dump-resource-usage")).groups()
        spills = len(re.findall(r"\b(?:STL|LDL)\b", say("-sass"))) if int(stack) else 0
    return int(registers), spills


def _amd_numbers(text: str) -> tuple[int, int]:
    number = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))
    return number("vgpr_count"), number("vgpr_spill_count") + number("sgpr_spill_count")


def compile_case(target: str, place: int) -> KernelRow:
    """Compile the case at `place` of kernel_cases(target)."""
    case, launch = next(islice(kernel_cases(target), place, None))
    compiled = triton.compile(source_of(launch), target=_target(target), options=launch.options)
    if target.startswith("sm_"):
        registers, spills = _nvidia_numbers(compiled.asm["cubin"])
    else:
        registers, spills = _amd_numbers(compiled.asm["amdgcn"])
    sizes = [str(size) for name, size in launch.constants.items() if name.startswith("BLOCK")]
    kind = next(launch.arguments[name] for name in KINDS if name in launch.arguments)
    return KernelRow(
        target=target,
        kernel=launch.kernel.__name__,
        case=case,
        dtype=str(kind.dtype).removeprefix("torch."),
        tile=" x ".join(sizes),
        warps=launch.warps,
        stages=launch.stages,
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        shared_limit=SHARED_LIMIT[target],
    )


def kernel_table(targets: Sequence[str], *, processes: int) -> list[KernelRow]:
    """Every kernel with every tile of device classes of rz.ops.tiles, compiled by so many processes.

    Raises: ValueError if processes < 1, or where Triton interprets kernels.
    """
    if processes < 1:
        raise ValueError(f"processes must be >= 1, got {processes}")
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET must not be set where kernels are compiled, got 1")
    places = [(target, place) for target in targets for place, _ in enumerate(kernel_cases(target))]
    if processes == 1:
        return list(_watched(map(compile_case, *zip(*places, strict=True)), len(places)))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(_watched(pool.map(compile_case, *zip(*places, strict=True)), len(places)))


def _watched(rows: Iterable[KernelRow], count: int) -> Iterator[KernelRow]:
    """The rows, with a line on standard error for every target that is done."""
    before = None
    for number, row in enumerate(rows):
        if before not in (None, row.target):
            print(f"{before}: compiled, {number} of {count} in all", file=sys.stderr, flush=True)
        before = row.target
        yield row

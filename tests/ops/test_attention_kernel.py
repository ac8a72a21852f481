import os
import subprocess
import sys

import pytest
import torch
from alignment import normal
from torch.testing import assert_close

from rz.ops import attention_kernel as kernel

ITEMS, HEADS, ROWS, KEYS, WIDTH = 2, 6, 32, 64, 16


def exact(q, k, v, masked):
    """Output and log-sum-exp in float64; 0 and 0 for a row without keys."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.double().transpose(2, 3) * WIDTH**-0.5).masked_fill(masked, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse[..., None]).exp().masked_fill(masked.all(-1)[..., None], 0)
    return (weights @ v.double()).float(), lse.masked_fill(masked.all(-1), 0).float()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("first", [0, 32])
@pytest.mark.parametrize("count", [kernel.TILE + 32, 2 * kernel.TILE, 3 * kernel.TILE + 64])
def test_a_rows_bits_do_not_depend_on_the_rows_past_its_tile(count, first, window):
    """One causal call a tile answers the later rows too: none may differ from a sequence that ends before them."""
    q, k, v = (normal(2, 3, count, 32, seed=seed) for seed in range(3))
    out, lse = kernel.causal_attention(q[:, :, first:], k, v, first=first, window=window)
    for end in range(first + 32, count, 96):
        short = kernel.causal_attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], first=first, window=window)
        assert torch.equal(out[:, :, : end - first], short[0]) and torch.equal(lse[:, :, : end - first], short[1])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["whole", "causal", "masked", "one mask row"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_both_ways_against_float64(monkeypatch, fused, kind, kv_heads):
    if fused and not kernel.FUSED:
        pytest.skip("a processor without AVX-512")
    monkeypatch.setattr(kernel, "FUSED", fused)
    q = normal(ITEMS, ROWS, HEADS, WIDTH).transpose(1, 2)
    k, v = (normal(ITEMS, KEYS, kv_heads, WIDTH, seed=seed).transpose(1, 2) for seed in (1, 2))
    masked = torch.zeros(ITEMS, 1, ROWS, KEYS, dtype=torch.bool)
    mask = None
    if kind == "causal":
        masked = masked | torch.ones(ROWS, KEYS, dtype=torch.bool).triu(1)
    elif kind != "whole":
        masked = torch.rand(ITEMS, 1, 1 if "one" in kind else ROWS, KEYS, generator=torch.manual_seed(0)) < 0.5
        masked[1, :, :3] = True  # rows without keys
        mask = kernel.additive(masked, torch.float32)
    got = kernel.fused(q, k, v, mask, causal=kind == "causal")
    for value, want in zip(got, exact(q, k, v, masked.expand(ITEMS, 1, ROWS, KEYS)), strict=True):
        assert_close(value, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("fused", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("window", [None, 1, 40, kernel.TILE])
@pytest.mark.parametrize("count", [32, kernel.TILE, kernel.TILE + 32, 544])
def test_shared_heads_have_the_bits_of_heads_of_their_own(monkeypatch, fused, dtype, window, count):
    if fused and not kernel.FUSED:
        pytest.skip("a processor without AVX-512")
    monkeypatch.setattr(kernel, "FUSED", fused)
    q, k, v = (normal(2, count, n, 32, dtype=dtype, seed=i).transpose(1, 2) for i, n in enumerate((6, 2, 2)))
    results = [
        kernel.causal_attention(q, *(x.repeat_interleave(times, 1) for x in (k, v)), first=0, window=window)
        for times in (1, 3)
    ]
    assert all(map(torch.equal, *results))


def test_a_tile_has_as_many_keys_as_the_makers_products_sum_in_order():
    # Measured: padded with zeros to 256 keys, up to 256 keep their bits on Intel; on AMD 160 of 224 or 256 do not, and
    # all of 192 do. A maker that was not measured gets what batched products allow.
    assert kernel.tile("GenuineIntel", fused=True) == 256 and kernel.tile("AuthenticAMD", fused=True) == 192
    assert kernel.tile("Other", fused=True) == kernel.tile("", fused=True) == 128
    assert kernel.tile("GenuineIntel", fused=False) == 128
    assert (
        kernel.maker("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: x\n\nvendor_id\t: y\n") == "AuthenticAMD"
    )
    assert kernel.maker("") == kernel.maker("processor : 0\n") == ""


def test_processors_without_avx512_are_aligned_too():
    code = """
import torch
from rz.ops import attention_kernel
from rz.ops.probe import probe
assert not attention_kernel.FUSED and attention_kernel.TILE == 128
for dtype in (torch.float32, torch.bfloat16):
    for heads in ((4, 2, 32), (14, 2, 80), (3, 3, 256)):
        for result in probe(dtype, attention=heads):
            assert result.passed or "attention" not in result.name, (dtype, heads, result)
"""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr

import pytest
import torch

from rz.ops.tiles import ATTENTION, GEMM, TARGETS, attention_backward_tile, attention_tile, gemm_tile, row_block


def test_every_device_class_has_tiles():
    assert set(TARGETS) < set(GEMM) and set(GEMM) == set(ATTENTION)


@pytest.mark.parametrize("target", TARGETS)
def test_amd_pipelines_have_two_stages_at_most(target):
    tiles = [*GEMM[target], *(tile for kind in ATTENTION[target] for tile in kind)]
    assert all(tile.stages <= 2 for tile in tiles) or target.startswith("sm_")


def test_the_columns_choose_the_tile():
    small, wide = (gemm_tile("sm_90", columns, 1024, torch.bfloat16) for columns in (4095, 4096))
    assert (small.n, wide.n) == (64, 128)
    assert gemm_tile("sm_90", 4096, 1024, torch.float32).k == 32


def test_widths():
    assert attention_tile("sm_90", 80, torch.float16).k == 128
    for width in (8, 20, 264):
        for tile in (attention_tile, attention_backward_tile):
            with pytest.raises(ValueError, match=f"head_dim must be a multiple of 8 in 16 to 256, got {width}"):
                tile("sm_90", width, torch.float16)
    assert row_block(80) == (8, 128, 4) and row_block(4096) == (1, 4096, 4)

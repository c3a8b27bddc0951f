"""Kernels by their names."""

from __future__ import annotations

import pytest

from fp8ctl.bench.breakdown import group_of, rows_of


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopA_TNN", "GEMM BF16"),
        ("nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNT", "GEMM FP8"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "GEMM FP8"),
        ("_block_gemm", "GEMM FP8"),
        ("_quantize_tile", "quantise"),
        ("_quantize_block", "quantise"),
        ("_swiglu_backward_quantize", "swiglu"),
        ("_softmax_loss", "loss"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm, rope"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>", "other"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
    ],
)
def test_groups(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_rows() -> None:
    kernels = [("nvjet_sm90_tst_a", 6.0, 3), ("nvjet_sm90_tst_b", 1.0, 1), ("_quantize_tile", 3.0, 9)]
    rows = rows_of("infir2", kernels)
    groups = [r for r in rows if r["table"] == "kernels by group"]
    assert [(r["group"], r["ms"], r["share"], r["calls"]) for r in groups] == [
        ("GEMM BF16", 7.0, 0.7, 4),
        ("quantise", 3.0, 0.3, 9),
    ]
    longest = [r for r in rows if r["table"] == "longest kernels"]
    assert [r["kernel"] for r in longest] == ["nvjet_sm90_tst_a", "_quantize_tile", "nvjet_sm90_tst_b"]
    assert len(rows_of("a", [(f"kernel{n}", 1.0, 1) for n in range(40)])) == 1 + 15

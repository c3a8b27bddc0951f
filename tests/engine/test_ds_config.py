"""Settings for DeepSpeed and batch arithmetic; no torch needed."""

import subprocess
import sys

import pytest

from fp8ctl.config.schema import BatchConfig, EngineConfig, TrainConfig
from fp8ctl.engine.ds_config import deepspeed_config, grad_accum_steps
from fp8ctl.errors import ConfigError


def config(stage: int, dtype: str) -> TrainConfig:
    return TrainConfig(
        batch=BatchConfig(micro_batch_rows=2, global_batch_rows=16), engine=EngineConfig(zero_stage=stage, dtype=dtype)
    )


@pytest.mark.parametrize(
    ("rows", "micro", "world", "steps"), [(1, 1, 1, 1), (16, 2, 1, 8), (16, 2, 4, 2), (8, 8, 1, 1)]
)
def test_accumulation_steps(rows: int, micro: int, world: int, steps: int) -> None:
    assert grad_accum_steps(BatchConfig(micro_batch_rows=micro, global_batch_rows=rows), world) == steps


def test_a_batch_that_does_not_divide_is_refused_with_the_batches_that_do() -> None:
    with pytest.raises(ConfigError) as error:
        grad_accum_steps(BatchConfig(micro_batch_rows=2, global_batch_rows=14), 4)
    assert error.value.message == (
        "batch.global_batch_rows = 14 is no multiple of micro_batch_rows x ranks = 2 x 4 = 8"
    )
    assert error.value.hint == "set batch.global_batch_rows=8 or 16, or change the number of ranks"


def test_a_batch_smaller_than_one_micro_step_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        grad_accum_steps(BatchConfig(micro_batch_rows=2, global_batch_rows=4), 4)
    assert error.value.hint == "set batch.global_batch_rows=8, or change the number of ranks"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_reduction_is_in_fp32_and_clipping_is_ours(stage: int, dtype: str) -> None:
    settings = deepspeed_config(config(stage, dtype), world_size=2, num_parameters=1001)
    assert settings["communication_data_type"] == "fp32"
    assert settings["gradient_clipping"] == 0.0
    assert settings["gradient_allreduce_op"] == ("mean" if stage == 3 else "sum")
    assert settings["gradient_accumulation_steps"] == 4
    assert "optimizer" not in settings  # DeepSpeed's own would be compiled on the spot
    zero = settings.get("zero_optimization")
    assert (zero is None) == (stage == 0)
    assert zero is None or (zero["stage"] == stage and zero["reduce_bucket_size"] == 1002)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_accumulates_in_fp32(stage: int) -> None:
    settings = deepspeed_config(config(stage, "bf16"), world_size=1)
    assert settings["bf16"]["enabled"] is True
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["zero_optimization"]["reduce_bucket_size"] == 500_000_000


def test_bf16_at_stage_0_keeps_deepspeeds_wrapper_out() -> None:
    settings = deepspeed_config(config(0, "bf16"), world_size=1)
    assert "bf16" not in settings
    assert "fp16" not in settings


def test_needs_no_torch() -> None:
    code = "import sys, fp8ctl.engine.ds_config, fp8ctl.engine.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

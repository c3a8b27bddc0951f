"""A step at every ZeRO stage in BF16 and FP32, in one process (two ranks: test_ranks.py)."""

import copy
import math

import engine_cases
import pytest
import torch
from engine_cases import DTYPES, ROWS, SHAPE, STAGES, TOKENS, make_engine, rows_batch, run_backward, run_step, settings
from torch import nn

from fp8ctl.config.schema import PrecisionConfig
from fp8ctl.engine import engine as engine_module
from fp8ctl.engine.engine import Engine
from fp8ctl.model.transformer import Transformer
from fp8ctl.precision.apply import apply_plan, set_precision
from fp8ctl.precision.plan import make_plan

everywhere = pytest.mark.parametrize(("stage", "dtype"), [(s, d) for d in DTYPES for s in STAGES])


@pytest.fixture
def all_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 3 shards every parameter; its default keeps those below 100,000 elements whole, here all of them."""
    usual = engine_module.deepspeed_config

    def sharding(*args: object) -> dict:
        made = usual(*args)
        if made.get("zero_optimization", {}).get("stage") == 3:
            made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return made

    monkeypatch.setattr(engine_module, "deepspeed_config", sharding)


class Trainer:
    """The same training without DeepSpeed: whole batch at once or micro-batches, FP32 masters, AdamW, all by hand."""

    def __init__(self, dtype: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Transformer(SHAPE)
        for p in self.model.parameters():
            p.data = p.data.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        self.masters = {n: p.detach().float().clone() for n, p in self.model.named_parameters()}
        self.start = dict(self.masters)
        self.m = {n: torch.zeros_like(w) for n, w in self.masters.items()}
        self.v = {n: torch.zeros_like(w) for n, w in self.masters.items()}
        self.t = 0

    def step(self, step: int, lr: float, *, clip: float = 1.0, decay: float = 0.1) -> tuple[float, float]:
        grads = {n: torch.zeros_like(w) for n, w in self.masters.items()}
        total = 0.0
        for row in range(ROWS):
            loss = self.model(**rows_batch(step, [row]))
            (loss * (1 / (ROWS * TOKENS))).backward()
            total += loss.item()
            for n, p in self.model.named_parameters():
                grads[n] += p.grad.float()
                p.grad = None
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grads.values()))
        factor = min(1.0, clip / (norm + 1e-6))
        self.t += 1
        for n, p in self.model.named_parameters():
            g = grads[n] * factor
            self.m[n] = 0.9 * self.m[n] + 0.1 * g
            self.v[n] = 0.95 * self.v[n] + 0.05 * g * g
            update = (self.m[n] / (1 - 0.9**self.t)) / ((self.v[n] / (1 - 0.95**self.t)).sqrt() + 1e-8)
            w = self.masters[n]
            self.masters[n] = w - lr * (decay if w.ndim > 1 else 0.0) * w - lr * update
            p.data.copy_(self.masters[n])
        return total / (ROWS * TOKENS), norm


@everywhere
def test_five_steps_equal_plain_training(stage: int, dtype: str) -> None:
    config = settings(stage, dtype, clip_grad_norm=1.0)
    engine, plain = make_engine(config), Trainer(dtype)
    for step in range(5):
        lr = 1e-3 * (step + 1)
        loss, norm = run_step(engine, config, step, lr)
        expected_loss, expected_norm = plain.step(step, lr)
        tolerance = 2e-6 if dtype == "fp32" else 2e-3
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        assert norm == pytest.approx(expected_norm, rel=tolerance)
        if step == 0:
            assert norm > 1.0  # so that clipping is at work
            # Before rounding can feed back, everything but the last bit agrees
            assert norm == pytest.approx(expected_norm, rel=1e-6)
    # Over the whole model: where a gradient is nothing but rounding (biases of keys), Adam makes a full step out of it
    weights = engine.gather_weights(torch.float32)
    moved = sum((plain.masters[n] - plain.start[n]).square().sum() for n in weights).sqrt()
    apart = sum((plain.masters[n].to(engine.dtype).float() - weights[n]).square().sum() for n in weights).sqrt()
    assert apart < (1e-4 if dtype == "fp32" else 2e-2) * moved
    engine.close()


@everywhere
def test_a_dropped_batch_was_never_seen(stage: int, dtype: str) -> None:
    config = settings(stage, dtype)
    engine = make_engine(config)

    def train(dropped: set[int]) -> list[tuple[float, float]]:
        return [run_step(engine, config, s) for s in range(3) if run_or_drop(s, dropped)]

    def run_or_drop(step: int, dropped: set[int]) -> bool:
        if step in dropped:
            before = engine.gather_weights()
            run_backward(engine, config, 77)
            engine.drop_step()
            assert engine_cases.same_weights(engine.gather_weights(), before)
        return True

    # Also before the very first update, when the optimizer has no state yet, and twice running
    with_drops = train(dropped={0, 1, 2})
    weights = engine.gather_weights()
    engine.close()
    engine = make_engine(config)
    assert train(dropped=set()) == with_drops
    assert engine_cases.same_weights(engine.gather_weights(), weights)
    engine.close()


@everywhere
def test_a_gradient_that_is_not_finite_reaches_nothing(stage: int, dtype: str) -> None:
    config = settings(stage, dtype)
    engine = make_engine(config)
    first = run_step(engine, config, 0)
    before = engine.gather_weights()
    for poison in (float("nan"), float("inf")):
        _, norm = run_backward(engine, config, 5, poison=poison)
        assert not math.isfinite(norm)
        assert engine.apply_step(1e-3) is False
        assert engine_cases.same_weights(engine.gather_weights(), before)
    second, weights = run_step(engine, config, 1), engine.gather_weights()
    engine.close()
    engine = make_engine(config)
    assert [run_step(engine, config, 0), run_step(engine, config, 1)] == [first, second]
    assert engine_cases.same_weights(engine.gather_weights(), weights)
    engine.close()


@everywhere
def test_accumulation_does_not_change_the_step(stage: int, dtype: str) -> None:
    results = []
    for micro_rows in (1, 4):
        config = settings(stage, dtype, micro_rows=micro_rows)
        engine = make_engine(config)
        assert engine.grad_accum_steps == 4 // micro_rows
        results.append([run_step(engine, config, step) for step in range(3)])
        engine.close()
    tolerance = 1e-6 if dtype == "fp32" else 3e-3
    for (loss, norm), (expected_loss, expected_norm) in zip(*results, strict=True):
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        assert norm == pytest.approx(expected_norm, rel=tolerance)


class Sum(nn.Module):
    """Its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).float().sum()


@everywhere
def test_micro_steps_are_added_in_fp32(stage: int, dtype: str) -> None:
    # 1 + 2^-9 is 1 in BF16: an accumulator in BF16 would stay at 1 for ever
    config = settings(stage, dtype, rows=129)
    engine = Engine(Sum(), config, engine_cases.start(config))
    for x in [1.0] + [2.0**-9] * 128:
        loss = engine.forward(torch.full((32, 32), x, dtype=engine.dtype))
        engine.backward(loss, num_trainable=1)
    assert engine.prepare_step() == pytest.approx(32 * (1 + 128 * 2.0**-9), rel=1e-7)
    engine.drop_step()
    engine.close()


@everywhere
def test_moments_and_masters_are_fp32(stage: int, dtype: str) -> None:
    config = settings(stage, dtype)
    engine = make_engine(config)
    run_step(engine, config, 0)
    states = list(engine._optimizer.state.values())
    assert states
    for state in states:
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        assert state["step"].item() == 1  # DeepSpeed's own BF16 wrapper at stage 0 would be at 2
    weights = engine.gather_weights()
    assert {w.dtype for w in weights.values()} == {engine.dtype}
    assert set(weights) == {n for n, _ in Transformer(SHAPE).named_parameters()}
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_deepspeeds_own(stage: int, dtype: str) -> None:
    config = settings(stage, dtype, clip_grad_norm=0.0)
    engine = make_engine(config)
    _, norm = run_backward(engine, config, 0)
    wrapper = engine.deepspeed.optimizer
    if hasattr(wrapper, "scaled_global_norm"):
        assert float(wrapper.scaled_global_norm()) == pytest.approx(norm, rel=1e-6)
        engine.drop_step()
    else:
        engine.apply_step(1e-3)
        assert float(engine.deepspeed.get_global_grad_norm()) == pytest.approx(norm, rel=1e-6)
    engine.close()


@everywhere
def test_activation_checkpointing_changes_nothing(stage: int, dtype: str, all_sharded: None) -> None:
    config, results = settings(stage, dtype), []
    for checkpointing in (False, True):
        engine = make_engine(config, checkpointing=checkpointing)
        results.append([run_step(engine, config, step) for step in range(2)])
        engine.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_stage_3_with_everything_sharded_equals_stage_1(dtype: str, all_sharded: None) -> None:
    """The tied embedding is used at both ends of the model, and in chunks that are recomputed in the backward pass."""
    results = []
    for stage in (1, 3):
        config = settings(stage, dtype)
        torch.manual_seed(0)
        model = Transformer(SHAPE)
        model.loss_chunk_tokens = 5
        engine = Engine(model, config, engine_cases.start(config))
        numbers = []
        for step in range(3):
            with torch.no_grad():  # a validation in between
                validation = engine.forward(**rows_batch(50, [0])).item()
            numbers.append((validation, *run_step(engine, config, step)))
        results.append(numbers)
        engine.close()
    for numbers, expected in zip(*results, strict=True):
        assert numbers == pytest.approx(expected, rel=1e-6 if dtype == "fp32" else 1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fp8_linears_at_stage_3_equal_stage_1(checkpointing: bool, all_sharded: None) -> None:
    """Fp8Linear keeps its weight for the backward pass by itself; a layer changes precision between two steps."""
    precision, results = PrecisionConfig(default="fp8"), []
    for stage in (1, 3):
        config = settings(stage, "bf16")
        torch.manual_seed(0)
        model = Transformer(SHAPE)
        model.activation_checkpointing = checkpointing
        apply_plan(model, make_plan(model, precision), precision)
        engine = Engine(model, config, engine_cases.start(config))
        numbers = [run_step(engine, config, 0)]
        set_precision(model, "model.layers.1.mlp.down_proj", "bf16")
        numbers += [run_step(engine, config, step) for step in (1, 2)]
        results.append(numbers)
        assert set(engine.gather_weights()) == {n for n, _ in Transformer(SHAPE).named_parameters()}
        engine.close()
    assert results[0] == [pytest.approx(n, rel=1e-3) for n in results[1]]


def test_learning_rate_of_each_step_is_used() -> None:
    config = settings(2, "fp32", weight_decay=0.0)
    engine = make_engine(config)
    before = engine.gather_weights()
    run_step(engine, config, 0, lr=0.0)
    assert engine_cases.same_weights(engine.gather_weights(), before)
    run_step(engine, config, 1, lr=1e-2)
    moved = (
        engine.gather_weights()["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    ).abs()
    assert 5e-3 < moved.max() < 2e-2
    engine.close()


def test_small_gradients_are_not_clipped() -> None:
    def moments(clip: float) -> torch.Tensor:
        config = settings(0, "fp32", clip_grad_norm=clip)
        engine = make_engine(config)
        run_step(engine, config, 0)
        found = next(iter(engine._optimizer.state.values()))["exp_avg"].clone()
        engine.close()
        return found

    assert torch.equal(moments(1e6), moments(0.0))
    clipped, whole = moments(1e-3), moments(0.0)
    assert clipped.norm() < 1e-2 * whole.norm()
    torch.testing.assert_close(clipped / clipped.norm(), whole / whole.norm())


def test_buffers_keep_their_dtype() -> None:
    model = Sum()
    model.register_buffer("frequencies", torch.tensor([1.0 + 2**-12]))
    for stage in (0, 1):
        config = settings(stage, "bf16", rows=1)
        engine = Engine(copy.deepcopy(model), config, engine_cases.start(config))
        assert engine.module.frequencies.item() == 1.0 + 2**-12
        engine.close()


def test_steps_out_of_order_are_caught() -> None:
    config = settings(0, "fp32")
    engine = make_engine(config)
    with pytest.raises(AssertionError, match="0 of 4 micro-batches"):
        engine.prepare_step()
    with pytest.raises(AssertionError, match="prepare_step comes first"):
        engine.apply_step(1e-3)
    with pytest.raises(AssertionError, match="prepare_step comes first"):
        engine.drop_step()
    run_backward(engine, config, 0)
    with pytest.raises(AssertionError, match="all micro-batches are in"):
        engine.backward(torch.ones((), requires_grad=True), num_trainable=1)
    engine.close()


def test_deepspeed_is_silent_and_torch_is_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    usual = torch.nn.functional.linear
    for stage in STAGES:
        config = settings(stage, "bf16")
        engine = make_engine(config)
        run_step(engine, config, 0)
        engine.close()
    assert torch.nn.functional.linear is usual
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")

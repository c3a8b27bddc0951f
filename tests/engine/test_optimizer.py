"""AdamW with FP32 masters, veto and clip factor, against AdamW written out by hand."""

import copy

import pytest
import torch
from torch import nn

from fp8ctl.config.schema import OptimConfig
from fp8ctl.engine.optimizer import MasterAdamW, VetoableAdamW, parameter_groups, sum_of_squares

OPTIM = OptimConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter((0.02 * torch.randn(24, 16, generator=generator)).to(dtype))
        self.bias = nn.Parameter((0.02 * torch.randn(16, generator=generator)).to(dtype))
        self.frozen = nn.Parameter(torch.zeros(3, 3).to(dtype), requires_grad=False)


def by_hand(master: torch.Tensor, gradients: list[torch.Tensor], lrs: list[float], weight_decay: float) -> torch.Tensor:
    """Loshchilov and Hutter 2019, algorithm 2, in FP32."""
    m, v = torch.zeros_like(master), torch.zeros_like(master)
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        m = OPTIM.beta1 * m + (1 - OPTIM.beta1) * g
        v = OPTIM.beta2 * v + (1 - OPTIM.beta2) * g * g
        m_hat, v_hat = m / (1 - OPTIM.beta1**t), v / (1 - OPTIM.beta2**t)
        master = master - lr * weight_decay * master - lr * m_hat / (v_hat.sqrt() + OPTIM.eps)
    return master


def gradients_of(model: Small, steps: int, micro_steps: int) -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [
            {
                n: torch.randn(p.shape, generator=generator).to(p.dtype)
                for n, p in model.named_parameters()
                if p.requires_grad
            }
            for _ in range(micro_steps)
        ]
        for _ in range(steps)
    ]


def feed(model: Small, gradients: dict[str, torch.Tensor]) -> None:
    """A backward pass that gives exactly these gradients."""
    sum((dict(model.named_parameters())[n] * g).sum() for n, g in gradients.items()).backward()


def test_masters_follow_adamw_written_by_hand_over_five_steps() -> None:
    model = Small(torch.bfloat16)
    start = {n: p.detach().float() for n, p in model.named_parameters()}
    optimizer = MasterAdamW(parameter_groups(model, OPTIM), OPTIM)
    lrs = [1e-3, 1e-3, 5e-4, 1e-4, 2e-3]
    steps = gradients_of(model, len(lrs), micro_steps=3)
    for lr, micro_steps in zip(lrs, steps, strict=True):
        for gradients in micro_steps:
            feed(model, gradients)
            assert model.weight.grad is None  # freed as soon as it is added
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

    masters = optimizer.state_dict()["masters"]
    for name, master, decay in (("weight", masters[0], 0.1), ("bias", masters[1], 0.0)):
        summed = [sum(g[name].float() for g in micro_steps) for micro_steps in steps]
        expected = by_hand(start[name], summed, lrs, decay)
        torch.testing.assert_close(master, expected, rtol=0.0, atol=1e-7)
        assert torch.equal(dict(model.named_parameters())[name], master.bfloat16())
    assert torch.equal(model.frozen, torch.zeros(3, 3, dtype=torch.bfloat16))


def test_vectors_have_no_weight_decay() -> None:
    matrices, vectors = parameter_groups(Small(torch.float32), OPTIM)
    assert [p.ndim for p in matrices["params"]] == [2]
    assert matrices["weight_decay"] == 0.1
    assert [p.ndim for p in vectors["params"]] == [1]
    assert vectors["weight_decay"] == 0.0


@pytest.mark.parametrize("masters", [False, True])
def test_a_veto_leaves_no_trace(masters: bool) -> None:
    def run(vetoed_first: bool) -> tuple[list[torch.Tensor], dict]:
        model = Small(torch.bfloat16 if masters else torch.float32)
        optimizer = (MasterAdamW if masters else VetoableAdamW)(parameter_groups(model, OPTIM), OPTIM)
        first, second, third = (micro_steps[0] for micro_steps in gradients_of(model, 3, micro_steps=1))
        for gradients, vetoed in ((first, vetoed_first), (second, False), (third, False)):
            if vetoed or gradients is not first:
                feed(model, gradients)
                optimizer.vetoed = vetoed
                optimizer.step()
                optimizer.zero_grad()
                for p in model.parameters():
                    p.grad = None
        return [p.detach() for p in model.parameters()], optimizer.state_dict()["state"]

    weights, state = run(vetoed_first=True)
    expected_weights, expected_state = run(vetoed_first=False)
    for a, b in zip(weights, expected_weights, strict=True):
        assert torch.equal(a, b)
    for i, entry in state.items():
        for key, value in entry.items():
            assert torch.equal(value, expected_state[i][key]), key


def test_clipping_divides_the_gradient() -> None:
    def run(divisor: float, factor: float) -> torch.Tensor:
        model = Small(torch.float32)
        optimizer = VetoableAdamW(parameter_groups(model, OPTIM), OPTIM)
        feed(model, {n: g * factor for n, g in gradients_of(model, 1, 1)[0][0].items()})
        optimizer.grad_divisor = divisor
        optimizer.step()
        return optimizer.state_dict()["state"][0]["exp_avg"]

    assert torch.equal(run(4.0, 1.0), run(1.0, 0.25))
    assert not torch.equal(run(1.0, 1.0), run(1.0, 0.25))


def test_state_survives_a_round_trip() -> None:
    def fresh() -> tuple[Small, MasterAdamW]:
        model = Small(torch.bfloat16)
        return model, MasterAdamW(parameter_groups(model, OPTIM), OPTIM)

    model, optimizer = fresh()
    first, second = (micro_steps[0] for micro_steps in gradients_of(model, 2, 1))
    feed(model, first)
    optimizer.step()
    other, restored = fresh()
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, restored)):
        feed(m, second)
        o.step()
    assert torch.equal(model.weight, other.weight)
    for a, b in zip(optimizer.state_dict()["masters"], restored.state_dict()["masters"], strict=True):
        assert torch.equal(a, b)


def test_destroy_takes_the_hooks_off() -> None:
    model = Small(torch.bfloat16)
    optimizer = MasterAdamW(parameter_groups(model, OPTIM), OPTIM)
    optimizer.destroy()
    feed(model, gradients_of(model, 1, 1)[0][0])
    assert model.weight.grad is not None


def test_sum_of_squares_of_many_elements_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4_000_000, generator=generator), torch.randn(777, 3, generator=generator), torch.empty(0)]
    expected = sum(t.double().square().sum().item() for t in tensors)
    assert sum_of_squares(tensors, torch.device("cpu")).item() == pytest.approx(expected, rel=1e-8)


def test_sum_of_squares_passes_on_what_is_not_finite() -> None:
    for bad in (float("nan"), float("inf")):
        x = torch.zeros(5000)
        x[17] = bad
        assert not torch.isfinite(sum_of_squares([x], torch.device("cpu")))

"""The optimizer that DeepSpeed drives at every ZeRO stage: AdamW with a veto and a clip factor set by the engine.

Whatever the stage, DeepSpeed's update ends in a call of this optimizer's `step`, on FP32 tensors: flat shards at stages
1 to 3, the parameters or their masters at stage 0. So this is the one place where an update can be refused or clipped
in the same way everywhere. A refused update still runs DeepSpeed's whole step, which clears gradients and counters by its
own rules; only masters and moments stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8ctl.config.schema import OptimConfig

_MASTERS = "masters"


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices with weight decay, vectors (norms and biases) without."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


class VetoableAdamW(torch.optim.AdamW):
    """torch's fused AdamW (the CPU has that kernel too) with two switches for the next `step`.

    `vetoed`: leave parameters and state alone. `grad_divisor`: divide gradients by it inside the kernel (clipping).
    """

    def __init__(self, groups: list[dict[str, Any]], optim: OptimConfig) -> None:
        super().__init__(
            groups, lr=optim.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0, fused=True
        )
        self.vetoed = False
        self.grad_divisor = 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One AdamW update, unless vetoed."""
        assert closure is None, "DeepSpeed never passes one"
        if self.vetoed:
            # DeepSpeed links its shards to the state after the first step, also when that one is refused
            self._create_state()
            return
        # The fused kernel reads this attribute, which is made for loss scaling; None skips the division
        self.grad_scale = None if self.grad_divisor == 1.0 else self._scalar(self.grad_divisor)
        super().step()

    def gradients(self) -> list[Tensor]:
        """Reduced gradients as `step` will see them, at stage 0 (at other stages DeepSpeed owns them)."""
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _create_state(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32, device=p.device),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }

    def _scalar(self, value: float) -> Tensor:
        (first, *_) = (p for group in self.param_groups for p in group["params"])
        return torch.tensor(value, dtype=torch.float32, device=first.device)


class MasterAdamW(VetoableAdamW):
    """AdamW for a BF16 model at ZeRO stage 0: FP32 masters and moments, gradients accumulated in FP32 over micro-steps.

    Each parameter's BF16 gradient is added to its part of one flat FP32 buffer as soon as backward has made it, and is
    freed. DeepSpeed all-reduces what `get_grads_for_reduction` gives it. Bytes per parameter: 2 weight, 4 gradient, 12
    master and moments.
    """

    def __init__(self, groups: list[dict[str, Any]], optim: OptimConfig) -> None:
        self._parameters: list[Tensor] = [p for g in groups for p in g["params"]]
        self._masters: list[Tensor] = [nn.Parameter(p.detach().float()) for p in self._parameters]
        masters = dict(zip(self._parameters, self._masters, strict=True))
        super().__init__([{**g, "params": [masters[p] for p in g["params"]]} for g in groups], optim)

        sizes = [m.numel() for m in self._masters]
        self._flat_gradient = torch.zeros(sum(sizes), dtype=torch.float32, device=self._masters[0].device)
        parts = self._flat_gradient.split(sizes)
        self._accumulators = [part.view_as(m) for part, m in zip(parts, self._masters, strict=True)]
        self._hooks = [
            p.register_post_accumulate_grad_hook(_adder(accumulator))
            for p, accumulator in zip(self._parameters, self._accumulators, strict=True)
        ]

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, Any]]:
        """What DeepSpeed reduces over ranks at the last micro-step: (gradients, those of experts)."""
        return self._accumulators, {}

    def gradients(self) -> list[Tensor]:
        """All accumulators, as one flat FP32 tensor."""
        return [self._flat_gradient]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the masters, rounds them into the model, and clears the accumulators; vetoed: only the last."""
        for master, accumulator in zip(self._masters, self._accumulators, strict=True):
            master.grad = accumulator
        super().step(closure)
        for master in self._masters:
            master.grad = None
        if not self.vetoed:
            torch._foreach_copy_(self._parameters, self._masters)
        self._flat_gradient.zero_()

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict and the masters."""
        return {**super().state_dict(), _MASTERS: [m.detach() for m in self._masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`; the model's weights are loaded apart."""
        super().load_state_dict({k: v for k, v in state_dict.items() if k != _MASTERS})
        for master, saved in zip(self._masters, state_dict[_MASTERS], strict=True):
            master.copy_(saved)

    def destroy(self) -> None:
        """Takes the hooks off the model; called by DeepSpeed's own `destroy`."""
        for hook in self._hooks:
            hook.remove()


def _adder(accumulator: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        accumulator.add_(parameter.grad)
        parameter.grad = None

    return add


def sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """FP64 scalar: sum of the squares of all elements of FP32 tensors.

    A plain FP32 norm on a CPU adds millions of squares one after the other and was 1.6e-3 too small for 28M elements (an
    embedding). So there, norms of rows of 256 elements are added in FP64: right to 1e-7 at the same speed. On a GPU the
    threads of a norm add few squares each, and one launch for all tensors is what counts.
    """
    if device.type == "cuda":
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum()  # type: ignore[arg-type]
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // 256 * 256
        total += torch.linalg.vector_norm(flat[:whole].view(-1, 256), dim=1).double().square().sum()
        total += flat[whole:].double().square().sum()
    return total

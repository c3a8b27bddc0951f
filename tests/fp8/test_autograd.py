"""torch.compile passes over the calls: one graph for all blocks, the same bits, and every GEMM counted when it runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.fp8.linear import Fp8Linear


class Block(nn.Module):
    def __init__(self, recipe: RecipeConfig) -> None:
        super().__init__()
        self.q = Fp8Linear(192, 256, recipe=recipe, dtype=torch.bfloat16)
        self.k = Fp8Linear(192, 128, recipe=recipe, dtype=torch.bfloat16)
        self.o = Fp8Linear(384, 192, False, recipe=recipe, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q.forward_together(x, (self.q, self.k))
        return x + self.o(torch.cat([torch.sin(q), k], -1))


def run(blocks: nn.ModuleList) -> list[Tensor | None]:
    x = torch.randn(64, 192, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16).requires_grad_()
    h: Tensor = x
    for block in blocks:
        h = block(h)
    h.float().square().sum().backward()
    return [h.detach(), x.grad, *(p.grad for p in blocks.parameters())]


@pytest.mark.parametrize("granularity", ["block", "tensor"])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_compiled_blocks_share_a_graph_and_give_the_same_bits(granularity: str, wgrad: str) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(Block(RecipeConfig(granularity=granularity, wgrad=wgrad)) for _ in range(3))  # type: ignore[arg-type]
    compiled = copy.deepcopy(plain)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in compiled:
        block.compile(fullgraph=True, backend=counter, dynamic=False)
    for precision in ("fp8", "bf16", "fp8"):
        for module in (*plain.modules(), *compiled.modules()):
            if isinstance(module, Fp8Linear):
                module.precision = precision  # type: ignore[assignment]
                module.weight.grad = None
                if module.bias is not None:
                    module.bias.grad = None
        for one, two in zip(run(plain), run(compiled), strict=True):
            assert one is not None and two is not None and torch.equal(one, two)
    assert counter.frame_count <= 2  # a graph in each precision, for all blocks
    for one, two in zip(plain.modules(), compiled.modules(), strict=True):
        if isinstance(one, Fp8Linear) and isinstance(two, Fp8Linear):
            assert one.counter.flops == two.counter.flops


def test_without_gradients_nothing_is_kept_and_a_copy_counts_for_itself() -> None:
    layer = Fp8Linear(192, 256, dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    torch._dynamo.reset()
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager", dynamic=False)
    x = torch.randn(16, 192, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    assert twin.counter.flops == layer.counter.flops and twin.counter.flops["fprop"]["fp8"] == 2 * 16 * 192 * 256

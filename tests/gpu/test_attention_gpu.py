"""Every kind of attention against FP32, document by document."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from fp8ctl.config.schema import ModelShape
from fp8ctl.errors import ModelError
from fp8ctl.model.attention import AttentionKind, Documents, attention
from fp8ctl.model.attention_choice import choose_attention
from fp8ctl.model.transformer import Transformer

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
KINDS = ["flash", "any"] + (["cudnn", "cudnn+flash"] if IS_HOPPER else [])
BOUNDS = [(0, 512), (0, 256, 512), (0, 300, 301, 512), (0, 77, 77, 400, 512)]
HEADS = [(12, 2, 128), (9, 3, 64), (4, 4, 64)]


def documents(bounds: tuple[int, ...], kind: AttentionKind) -> Documents:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    return Documents(cu_seqlens, bounds, bounds[-1], (), kind)


def random_qkv(num_tokens: int, heads: tuple[int, int, int]) -> list[torch.Tensor]:
    """Views into one buffer, as one GEMM for all three gives them."""
    N, K, H = heads
    generator = torch.Generator("cuda").manual_seed(0)
    packed = torch.randn(num_tokens, (N + 2 * K) * H, device="cuda", generator=generator).bfloat16()
    parts = packed.split([N * H, K * H, K * H], dim=1)
    return [x.unflatten(1, (-1, H)).detach().requires_grad_() for x in parts]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: AttentionKind, bounds: tuple[int, ...], heads: tuple[int, int, int]) -> None:
    if kind == "cudnn" and len({b - a for a, b in pairwise(bounds)}) > 1:
        pytest.skip("takes documents of equal length only")
    q, k, v = random_qkv(bounds[-1], heads)
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    weights = torch.randn(q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    out = attention(q, k, v, documents(bounds, kind))
    expected = attention(exact[0], exact[1], exact[2], documents(bounds, "any"))
    got = torch.autograd.grad(out, [q, k, v], weights.bfloat16())
    want = torch.autograd.grad(expected, exact, weights)
    for a, b in zip((out, *got), (expected, *want), strict=True):
        assert (a.float() - b).norm() < 1e-2 * b.norm()


@pytest.mark.parametrize("bounds", BOUNDS[2:])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cudnn"])
def test_what_stands_in_one_document_moves_no_bit_of_another(kind: AttentionKind, bounds: tuple[int, ...]) -> None:
    q, k, v = (x.detach().contiguous() for x in random_qkv(bounds[-1], HEADS[0]))
    before = attention(q, k, v, documents(bounds, kind))
    for x in (q, k, v):
        x[: bounds[1]] *= -2.0
    after = attention(q, k, v, documents(bounds, kind))
    assert torch.equal(before[bounds[1] :], after[bounds[1] :])
    assert not torch.equal(before[: bounds[1]], after[: bounds[1]])


def kernels(kind: AttentionKind, bounds: tuple[int, ...]) -> str:
    """Names of what ran on the GPU."""
    q, k, v = random_qkv(bounds[-1], HEADS[0])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        attention(q, k, v, documents(bounds, kind)).sum().backward()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profiler.key_averages())


@hopper
def test_the_named_kernel_is_the_one_that_runs() -> None:
    assert "cudnn" in kernels("cudnn", (0, 256, 512))
    with pytest.raises(ModelError, match="attention=cudnn takes rows full of documents of equal length only"):
        kernels("cudnn", (0, 100, 512))
    assert "cudnn" in kernels("cudnn+flash", (0, 256, 512))
    for kind, bounds in (("cudnn+flash", (0, 100, 512)), ("flash", (0, 256, 512))):
        names = kernels(kind, bounds)  # type: ignore[arg-type]
        assert "flash_fwd" in names and "cudnn" not in names


@hopper
def test_auto_on_hopper() -> None:
    choice = choose_attention("auto", head_size=128, num_heads=12, num_kv_heads=2, device="cuda")
    assert choice.name == "cudnn+flash", choice.reason


@pytest.mark.parametrize("asked", ["flash", "any", *(["cudnn"] if IS_HOPPER else [])])
def test_what_is_asked_for(asked: str) -> None:
    assert choose_attention(asked, head_size=64, num_heads=9, num_kv_heads=3, device="cuda").name == asked


@pytest.mark.parametrize("asked", ["auto", "flash", "cudnn"])
def test_heads_that_no_fast_kernel_takes(asked: str) -> None:
    with pytest.raises(ModelError, match="no fast attention for 4 query heads on 2 key/value heads of size 20: ") as e:
        choose_attention(asked, head_size=20, num_heads=4, num_kv_heads=2, device="cuda")
    assert e.value.hint is not None and "engine.attention=" in e.value.hint
    q, k, v = random_qkv(64, (4, 2, 20))
    assert attention(q, k, v, documents((0, 30, 64), "any")).isfinite().all()


@hopper
@torch._dynamo.config.patch(recompile_limit=32)
def test_compiled_blocks_are_not_compiled_for_each_batch() -> None:
    """Documents differ from batch to batch; after a few forms nothing is compiled anew, and nothing breaks the graph."""
    shape = ModelShape(
        family="qwen3",
        num_layers=2,
        hidden_size=256,
        ffn_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        vocab_size=97,
        max_positions=1024,
    )
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model = Transformer(shape).cuda().bfloat16()
    model.attention_kind = "cudnn+flash"
    compiled = Transformer(shape).cuda().bfloat16()
    compiled.attention_kind = "cudnn+flash"
    compiled.load_state_dict(model.state_dict())
    backend = CompileCounterWithBackend("inductor")
    for block in compiled.model.layers:
        block.compile(backend=backend)
    counts = []
    for lengths in ([512], [256, 256], [100, 412], [200, 300, 12], [50] * 10 + [12], [512], [3, 509], [128] * 4):
        ids = torch.randint(0, 97, (512,), device="cuda")
        positions = torch.cat([torch.arange(n, device="cuda") for n in lengths])
        cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        losses = [m(ids, positions, cu_seqlens, max(lengths), labels_T=ids) for m in (model, compiled)]
        for loss in losses:
            loss.backward()
        assert (losses[0] - losses[1]).abs() < 1e-3 * losses[0]
        counts.append(backend.frame_count)
    assert counts[-1] == counts[4] <= 10
    assert not counters["graph_break"]
    for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 3e-2 * a.grad.norm()  # type: ignore[union-attr, operator]
    torch._dynamo.reset()

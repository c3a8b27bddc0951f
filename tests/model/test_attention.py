from itertools import pairwise

import pytest
import torch

from fp8ctl.model.attention import Documents, attention

BOUNDS = [(0, 20), (0, 1, 2, 20), (0, 7, 7, 19, 20)]


def documents(*bounds, starts=(), device="cpu"):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    return Documents(cu_seqlens, bounds, int(cu_seqlens.diff().max()), starts)


def random_qkv(num_queries, num_keys, num_kv_heads=2, head_size=16):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(length, heads, head_size, generator=generator)
        for length, heads in ((num_queries, 6), (num_keys, num_kv_heads), (num_keys, num_kv_heads))
    ]


def plain(q_TNH, k_SKH, v_SKH, docs):
    """The formula with one whole T x S mask, in FP64."""
    T, N, H = q_TNH.shape
    group = N // k_SKH.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k_SKH, v_SKH))
    seen = torch.zeros(T, len(k_SKH), dtype=torch.bool)
    for (a, b), (c, d) in zip(pairwise(docs.bounds), pairwise(docs.key_bounds), strict=True):
        for i in range(a, b):
            seen[i, c : d - (b - 1 - i)] = True
    scores = q_TNH.double().transpose(0, 1) @ k.transpose(1, 2) / H**0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_equals_the_formula(num_kv_heads, bounds):
    qkv, docs = random_qkv(20, 20, num_kv_heads), documents(*bounds)
    assert torch.allclose(attention(*qkv, docs).double(), plain(*qkv, docs), atol=1e-6)


def test_keys_of_a_cache_come_before_the_new_ones():
    docs = documents(0, 3, 4, 9, starts=(5, 0, 2))
    assert docs.key_bounds == (0, 8, 9, 16)
    qkv = random_qkv(9, 16)
    assert torch.allclose(attention(*qkv, docs).double(), plain(*qkv, docs), atol=1e-6)


def test_bf16_is_as_exact_as_its_rounding():
    qkv, docs = [x.bfloat16() for x in random_qkv(64, 64)], documents(0, 30, 64)
    out = attention(*qkv, docs)
    assert out.dtype == torch.bfloat16
    assert (out.double() - plain(*qkv, docs)).abs().max() < 2**-8 * 4


def test_a_document_alone_has_the_bits_it_has_among_others():
    q, k, v = random_qkv(90, 90)
    together = attention(q, k, v, documents(0, 40, 71, 90))
    assert torch.equal(together[40:71], attention(q[40:71], k[40:71], v[40:71], documents(0, 31)))


def test_decode_is_one_token_for_each_document():
    assert documents(0, 1, 2, 3).is_decode
    assert not documents(0, 1, 3).is_decode
    assert not documents(0, 0, 1).is_decode


def test_views_into_one_buffer_give_the_same():
    packed = torch.randn(20, (6 + 2 + 2) * 16, generator=torch.Generator().manual_seed(0))
    q, k, v = (x.unflatten(1, (-1, 16)) for x in packed.split([96, 32, 32], dim=1))
    docs = documents(0, 7, 20)
    assert torch.equal(attention(q, k, v, docs), attention(q.contiguous(), k.contiguous(), v.contiguous(), docs))


def test_row_tokens_is_the_length_that_all_documents_have():
    assert documents(0, 20).row_tokens == 20
    assert documents(0, 10, 20).row_tokens == 10
    assert documents(0, 10, 19).row_tokens == 0
    assert documents(0, 10, 10, 20).row_tokens == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bounds", "starts"), [*((b, ()) for b in BOUNDS), ((0, 3, 4, 20), (5, 0, 2))])
def test_gpu_equals_the_formula(dtype, bounds, starts):
    docs = documents(*bounds, starts=starts)
    qkv = [x.to(dtype) for x in random_qkv(20, docs.key_bounds[-1])]
    on_gpu = [x.detach().cuda().requires_grad_() for x in qkv]
    out = attention(*on_gpu, documents(*bounds, starts=starts, device="cuda"))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert (out.cpu().double() - plain(*qkv, docs)).abs().max() < tolerance
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((out * weights.cuda()).sum(), on_gpu)
    exact = [x.double().requires_grad_() for x in qkv]
    expected = torch.autograd.grad((plain(*exact, docs) * weights).sum(), exact)
    for got, want in zip(grads, expected, strict=True):
        assert (got.cpu().double() - want).norm() < tolerance * want.norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_gpu_bits_do_not_depend_on_the_other_documents():
    q, k, v = (x.cuda().bfloat16() for x in random_qkv(900, 900))
    together = attention(q, k, v, documents(0, 400, 713, 900, device="cuda"))
    alone = attention(q[400:713], k[400:713], v[400:713], documents(0, 313, device="cuda"))
    assert torch.equal(together[400:713], alone)

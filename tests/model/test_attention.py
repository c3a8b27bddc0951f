import pytest
import torch

from fp8ctl.model.attention import Documents, attention


def documents(*bounds):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return Documents(cu_seqlens, bounds, int(cu_seqlens.diff().max()))


def plain(q_TNH, k_TKH, v_TKH, bounds):
    """The formula with a whole T x T mask, in FP64."""
    T, N, H = q_TNH.shape
    group = N // k_TKH.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k_TKH, v_TKH))
    owner = torch.bucketize(torch.arange(T), torch.tensor(bounds[1:]), right=True)
    seen = (owner[:, None] == owner) & (torch.arange(T)[:, None] >= torch.arange(T))
    scores = q_TNH.double().transpose(0, 1) @ k.transpose(1, 2) / H**0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("bounds", [(0, 20), (0, 1, 2, 20), (0, 7, 7, 19, 20)])
def test_equals_the_formula(num_kv_heads, bounds):
    torch.manual_seed(0)
    q, k, v = torch.randn(20, 6, 8), torch.randn(20, num_kv_heads, 8), torch.randn(20, num_kv_heads, 8)
    assert torch.allclose(attention(q, k, v, documents(*bounds)).double(), plain(q, k, v, bounds), atol=1e-6)


def test_bf16_is_as_exact_as_its_rounding():
    torch.manual_seed(0)
    q, k, v = torch.randn(64, 4, 16).bfloat16(), torch.randn(64, 2, 16).bfloat16(), torch.randn(64, 2, 16).bfloat16()
    out = attention(q, k, v, documents(0, 30, 64))
    assert out.dtype == torch.bfloat16
    assert (out.double() - plain(q, k, v, (0, 30, 64))).abs().max() < 2**-8 * 4


def test_a_document_alone_has_the_bits_it_has_among_others():
    torch.manual_seed(0)
    q, k, v = torch.randn(90, 4, 16), torch.randn(90, 2, 16), torch.randn(90, 2, 16)
    together = attention(q, k, v, documents(0, 40, 71, 90))
    assert torch.equal(together[40:71], attention(q[40:71], k[40:71], v[40:71], documents(0, 31)))


def test_decode_is_one_token_for_each_document():
    assert documents(0, 1, 2, 3).is_decode
    assert not documents(0, 1, 3).is_decode
    assert not documents(0, 0, 1).is_decode

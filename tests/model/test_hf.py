import json
import shutil
import signal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fp8ctl.errors import ModelError
from fp8ctl.model.hf import load_hf, read_shape, save_hf, weight_files
from fp8ctl.model.transformer import Transformer


def test_round_trip_gives_the_same_bytes(kind, hf_folder, tmp_path):
    source = hf_folder(kind)
    model = load_hf(source)
    save_hf(model.state_dict(), model.shape, tmp_path / "out", dtype=torch.float32)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert read_shape(tmp_path / "out") == model.shape


def test_bf16_round_trip_gives_the_same_bytes(hf_model, tmp_path):
    hf_model("qwen3-tied").bfloat16().save_pretrained(tmp_path / "a")
    model = load_hf(tmp_path / "a")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    save_hf(model.state_dict(), model.shape, tmp_path / "b")
    assert (tmp_path / "b/model.safetensors").read_bytes() == (tmp_path / "a/model.safetensors").read_bytes()


@torch.no_grad()
def test_transformers_loads_what_we_write(kind, hf_model, hf_folder, tmp_path):
    model = load_hf(hf_folder(kind))
    save_hf(model.state_dict(), model.shape, tmp_path / "out", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(40)[None]
    assert type(theirs) is type(hf_model(kind))
    assert torch.equal(theirs(ids).logits, hf_model(kind)(ids).logits)


def test_shards_of_transformers_load(hf_model, hf_folder, tmp_path):
    whole = load_hf(hf_folder("llama"))
    hf_model("llama").save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(weight_files(tmp_path / "sharded")) > 2
    sharded = load_hf(tmp_path / "sharded")
    for (name, a), b in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_shards_out_and_in_again(model, tmp_path):
    state = model.state_dict()
    save_hf(state, model.shape, tmp_path / "a", dtype=torch.float32, max_shard_bytes=20_000)
    names = [p.name for p in weight_files(tmp_path / "a")]
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors" and len(names) > 2
    assert all(sum(t.nbytes for t in load_file(tmp_path / "a" / n).values()) <= 20_000 for n in names)
    index = json.loads((tmp_path / "a/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert set(index["weight_map"]) == set(state)
    again = load_hf(tmp_path / "a")
    save_hf(again.state_dict(), again.shape, tmp_path / "b", dtype=torch.float32, max_shard_bytes=20_000)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(theirs.model.norm.weight, state["model.norm.weight"])


def test_saving_again_leaves_no_old_weights(model, tmp_path):
    save_hf(model.state_dict(), model.shape, tmp_path, dtype=torch.float32, max_shard_bytes=20_000)
    save_hf(model.state_dict(), model.shape, tmp_path, dtype=torch.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    save_hf(model.state_dict(), model.shape, tmp_path, dtype=torch.float32, max_shard_bytes=50_000)
    assert not (tmp_path / "model.safetensors").exists()
    load_hf(tmp_path)


def test_saving_over_the_folder_that_was_loaded_is_safe(model, tmp_path):
    save_hf(model.state_dict(), model.shape, tmp_path, dtype=torch.float32)
    loaded = load_hf(tmp_path)
    with torch.no_grad():
        loaded.model.norm.weight.mul_(3)
    save_hf(loaded.state_dict(), model.shape, tmp_path, dtype=torch.float32)
    assert torch.equal(load_hf(tmp_path).model.norm.weight, model.model.norm.weight * 3)


def test_files_are_readable_as_other_files_are(model, tmp_path):
    """safetensors alone would leave them to their owner."""
    save_hf(model.state_dict(), model.shape, tmp_path)
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == plain.stat().st_mode


def test_views_of_one_flat_buffer_are_saved(model, tmp_path):
    """Engines keep all weights in one buffer; safetensors refuses tensors that share memory carelessly."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    state, begin = {}, 0
    for name, p in model.named_parameters():
        state[name] = flat[begin : begin + p.numel()].view(p.shape)
        begin += p.numel()
    save_hf(state, model.shape, tmp_path, dtype=torch.float32)
    assert torch.equal(load_hf(tmp_path).head_weight, model.head_weight)


def test_dtype_is_converted_on_load(model, tmp_path):
    save_hf(model.state_dict(), model.shape, tmp_path, dtype=torch.float32)
    loaded = load_hf(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(loaded.head_weight, model.head_weight.bfloat16())
    assert loaded.head_weight.requires_grad


def test_tokenizer_and_special_tokens_travel_along(hf_folder, tmp_path):
    source = hf_folder("llama")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "optimizer.pt").write_text("not this")
    model = load_hf(source)
    save_hf(model.state_dict(), model.shape, tmp_path / "out", tokenizer_from=source)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["torch_dtype"]) == (1, 2, "bfloat16")


def test_weights_are_saved_where_there_is_no_tokenizer_to_copy(model, tmp_path):
    (tmp_path / "empty").mkdir()
    save_hf(model.state_dict(), model.shape, tmp_path / "out", tokenizer_from=tmp_path / "empty")
    assert load_hf(tmp_path / "out").shape == model.shape


def test_a_head_stored_beside_the_embedding_it_is_tied_to_is_accepted(hf_folder):
    folder = hf_folder("llama-tied")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    assert load_hf(folder).shape.tie_embeddings


# ---------------------------------------------------------------- what is refused


def refused(folder, message):
    with pytest.raises(ModelError, match=message) as e:
        load_hf(folder)
    assert e.value.hint
    return e.value


def change(folder, **tensors):
    path = folder / "model.safetensors"
    merged = {**load_file(path), **{n.replace("__", "."): t for n, t in tensors.items()}}
    save_file({n: t for n, t in merged.items() if t is not None}, path)


def test_no_folder(tmp_path):
    refused(tmp_path / "none", "no model folder: .*none")


def test_no_config(tmp_path):
    refused(tmp_path, "no config.json in")


def test_a_config_that_is_not_json(hf_folder):
    folder = hf_folder("llama")
    (folder / "config.json").write_text('{"model_type": "lla')
    refused(folder, "config.json is not JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json holds no JSON object")


def test_no_weights(hf_folder):
    folder = hf_folder("llama")
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights in")


def test_pickled_weights(hf_folder):
    folder = hf_folder("llama")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    error = refused(folder, r"holds pickled weights \(pytorch_model.bin\), which can run code when they are read")
    assert "safetensors" in error.hint


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_half_written_weights(hf_folder, kept):
    folder = hf_folder("llama")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:kept])
    refused(folder, "model.safetensors is damaged or only half written")


def test_missing_extra_and_misshapen_tensors_are_said_at_once(hf_folder):
    folder = hf_folder("llama")
    change(folder, model__norm__weight=None, extra=torch.ones(1), lm_head__weight=torch.ones(97, 40))
    error = refused(folder, "missing: model.norm.weight; unexpected: extra; wrong size: lm_head.weight")
    assert "lm_head.weight [97, 40] instead of [97, 48]" in error.message
    assert error.hint == "weights and config.json must come from the same model"


def test_long_lists_are_cut(hf_folder):
    folder = hf_folder("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    error = refused(folder, "missing: model.layers.3")
    assert error.message.endswith("and 6 more")


def test_quantized_tensors(hf_folder):
    folder = hf_folder("llama")
    change(folder, lm_head__weight=torch.ones(97, 48).to(torch.float8_e4m3fn))
    refused(folder, "holds quantized tensors: lm_head.weight")


def test_a_tied_head_that_differs(hf_folder):
    folder = hf_folder("llama-tied")
    change(folder, lm_head__weight=torch.ones(97, 48))
    refused(folder, "ties the head to the embedding, but lm_head.weight differs from model.embed_tokens.weight")


def test_missing_shard(model, tmp_path):
    save_hf(model.state_dict(), model.shape, tmp_path, max_shard_bytes=20_000)
    weight_files(tmp_path)[1].unlink()
    refused(tmp_path, "lacks shards that its index names: model-00002-of-")


def test_an_index_cannot_lead_outside_the_folder(model, tmp_path):
    folder = tmp_path / "model"
    save_hf(model.state_dict(), model.shape, folder, max_shard_bytes=20_000)
    shutil.move(folder / "model-00001-of-00003.safetensors", tmp_path / "elsewhere.safetensors")
    index = (folder / "model.safetensors.index.json").read_text()
    (folder / "model.safetensors.index.json").write_text(
        index.replace("model-00001-of-00003.safetensors", "../elsewhere.safetensors")
    )
    refused(folder, "lacks shards that its index names: ../elsewhere.safetensors")


def test_a_broken_index(model, tmp_path):
    save_hf(model.state_dict(), model.shape, tmp_path, max_shard_bytes=20_000)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    refused(tmp_path, "is no index of shards")


def test_a_state_that_does_not_fit_is_not_written(model, shape, tmp_path):
    state = {**model.state_dict(), "model.norm.weight": torch.ones(0)}
    with pytest.raises(
        ModelError, match=r"the tensors of the state .* wrong size: model.norm.weight \[0\] instead of \[32\]"
    ):
        save_hf(state, shape, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_cannot_be_written_leave_the_old_ones(model, tmp_path):
    import resource

    save_hf(model.state_dict(), model.shape, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    other = Transformer(model.shape)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # as a full disk would stop it
    try:
        with pytest.raises(ModelError, match="can't write .*model.safetensors") as e:
            save_hf(other.state_dict(), other.shape, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "free some space" in e.value.hint
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]

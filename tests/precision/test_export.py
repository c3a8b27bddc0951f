from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fp8ctl.config.schema import ModelShape, PrecisionConfig
from fp8ctl.errors import ModelError, PrecisionError
from fp8ctl.fp8.reference import dequantize, quantize_block
from fp8ctl.model.hf import load_hf, save_hf
from fp8ctl.model.transformer import Transformer
from fp8ctl.precision.apply import apply_plan, fp8_linears
from fp8ctl.precision.export import export_fp8_block, export_hf
from fp8ctl.precision.plan import make_plan

SHAPE = ModelShape(
    family="qwen2", num_layers=2, hidden_size=256, ffn_size=384, num_heads=4, num_kv_heads=2, head_size=64,
    vocab_size=300, max_positions=128,
)  # fmt: skip


def write(folder: Path, max_shard_bytes: int = 5_000_000_000, **changes: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shape = SHAPE.model_copy(update=changes)
    state = {n: t + 0.01 * torch.randn_like(t) for n, t in Transformer(shape).bfloat16().state_dict().items()}
    save_hf(state, shape, folder, max_shard_bytes=max_shard_bytes)
    (folder / "tokenizer.json").write_text("{}")
    return state


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


def stored_values(folder: Path) -> dict[str, torch.Tensor]:
    """Weights as a reader of the format sees them."""
    tensors = read(folder)
    return {
        n: dequantize(t, tensors[f"{n}_scale_inv"]).bfloat16() if f"{n}_scale_inv" in tensors else t
        for n, t in tensors.items()
        if not n.endswith("_scale_inv")
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scale_kind", ["pow2", "fp32"])
def test_layout_names_and_values(tmp_path: Path, tied: bool, scale_kind: str) -> None:
    state = write(tmp_path / "src", tie_embeddings=tied)
    summary = export_fp8_block(tmp_path / "src", tmp_path / "dst", scale_kind=scale_kind)  # type: ignore[arg-type]
    tensors = read(tmp_path / "dst")
    assert len(summary.fp8_linears) == 14 and summary.kept_linears == ("lm_head",)
    assert summary.bytes == (tmp_path / "dst/model.safetensors").stat().st_size < summary.source_bytes

    for fqn in summary.fp8_linears:
        q = quantize_block(state[f"{fqn}.weight"], scale_kind=scale_kind)  # type: ignore[arg-type]
        codes, scale_inv = tensors.pop(f"{fqn}.weight"), tensors.pop(f"{fqn}.weight_scale_inv")
        assert codes.dtype == torch.float8_e4m3fn and torch.equal(codes.view(torch.uint8), q.codes.view(torch.uint8))
        assert scale_inv.dtype == torch.float32 and torch.equal(scale_inv, q.scale_inv)
    assert all(torch.equal(tensors[n], state[n]) for n in tensors)
    assert set(tensors) == {n for n in state if n.removesuffix(".weight") not in summary.fp8_linears}

    config = json.loads((tmp_path / "dst/config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    assert {k: v for k, v in config.items() if k != "quantization_config"} == json.loads(
        (tmp_path / "src/config.json").read_text()
    )
    assert (tmp_path / "dst/tokenizer.json").read_text() == "{}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dst", "src"]
    mode = (tmp_path / "src/model.safetensors").stat().st_mode
    assert (tmp_path / "dst/model.safetensors").stat().st_mode == mode


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_the_same_values(tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers dequantises on a machine without a GPU: values and logits are those of the reference."""
    # All it needs accelerate for is a device map, which a CPU run has none of
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    write(tmp_path / "src", tie_embeddings=tied)
    (tmp_path / "src/tokenizer.json").unlink()
    export_fp8_block(tmp_path / "src", tmp_path / "dst", keep=["model.layers.1.mlp.down_proj"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dst", dtype=torch.bfloat16)
    values = stored_values(tmp_path / "dst")
    loaded = theirs.state_dict()
    for name, value in values.items():
        assert torch.equal(loaded[name], value), name

    ours = load_hf(tmp_path / "src", dtype=torch.bfloat16)
    ours.load_state_dict(values)
    ids = torch.arange(40) % 300
    with torch.no_grad():
        hidden = ours.float()(ids, torch.arange(40), torch.tensor([0, 40], dtype=torch.int32), 40)
        assert torch.allclose(ours.logits(hidden), theirs.float()(ids[None]).logits[0], atol=1e-4)


def test_stored_values_are_those_that_an_fp8_run_multiplies(tmp_path: Path) -> None:
    write(tmp_path / "src")
    export_fp8_block(tmp_path / "src", tmp_path / "dst")
    model, config = load_hf(tmp_path / "src", dtype=torch.bfloat16), PrecisionConfig(default="fp8")
    apply_plan(model, make_plan(model, config), config)
    values = stored_values(tmp_path / "dst")
    for fqn, layer in fp8_linears(model).items():
        if fqn != "lm_head":
            assert torch.equal(layer.quantized_weight()[0], values[f"{fqn}.weight"])


def test_shards_stay_shards_with_a_complete_index(tmp_path: Path) -> None:
    state = write(tmp_path / "src", max_shard_bytes=500_000)
    export_fp8_block(tmp_path / "src", tmp_path / "dst")
    index = json.loads((tmp_path / "dst/model.safetensors.index.json").read_text())
    names = [p.name for p in sorted((tmp_path / "dst").glob("*.safetensors"))]
    assert names == [p.name for p in sorted((tmp_path / "src").glob("*.safetensors"))] and len(names) > 2
    for name in names:
        assert {t for t, place in index["weight_map"].items() if place == name} == set(
            load_file(tmp_path / "dst" / name)
        )
    assert index["metadata"]["total_size"] == sum((tmp_path / "dst" / name).stat().st_size for name in names)
    assert set(stored_values(tmp_path / "dst")) == set(state)


def test_kept_linears_take_those_fused_with_them_along(tmp_path: Path) -> None:
    write(tmp_path / "src")
    keep = ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]
    summary = export_fp8_block(tmp_path / "src", tmp_path / "dst", keep=keep)
    assert summary.kept_linears == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    )
    with pytest.raises(PrecisionError) as e:
        export_fp8_block(tmp_path / "src", tmp_path / "other", keep=["model.layers.0.self_attn.k_prok"])
    assert e.value.message == (
        "no linear 'model.layers.0.self_attn.k_prok' to keep as it is (did you mean 'model.layers.0.self_attn.k_proj'?)"
    )


def test_weights_with_short_blocks_stay_as_they_are_unless_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "kv", head_size=48)  # q 192 and kv 96 rows: no multiples of 128
    summary = export_fp8_block(tmp_path / "kv", tmp_path / "kv-dst")
    assert {fqn.rpartition(".")[2] for fqn in summary.fp8_linears} == {"gate_proj", "up_proj", "down_proj"}

    write(tmp_path / "src", hidden_size=192)
    with pytest.raises(PrecisionError) as e:
        export_fp8_block(tmp_path / "src", tmp_path / "dst")
    assert e.value.message == "no linear can be stored in whole 128x128 blocks (hidden size 192)"
    assert e.value.hint == "export as hf: readers of FP8 folders mistake short blocks"

    state = write(tmp_path / "src", hidden_size=192)
    summary = export_fp8_block(tmp_path / "src", tmp_path / "dst", short_blocks=True)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert read(tmp_path / "dst")[f"{name}_scale_inv"].shape == (1, 2) and len(summary.fp8_linears) == 14
    error = (stored_values(tmp_path / "dst")[name].float() - state[name].float()).abs()
    assert 0 < error.max() < state[name].abs().max() / 16


def test_export_hf_copies_the_model_and_nothing_else(tmp_path: Path) -> None:
    state = write(tmp_path / "src", max_shard_bytes=500_000)
    (tmp_path / "src/optimizer.pt").write_text("not a part of the model")
    export_hf(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst/optimizer.pt").exists() and (tmp_path / "dst/tokenizer.json").exists()
    loaded = load_hf(tmp_path / "dst").state_dict()
    assert all(torch.equal(loaded[n], state[n]) for n in state)


@pytest.mark.parametrize("export", [export_hf, export_fp8_block])
def test_failures_leave_nothing_behind(tmp_path: Path, export: object, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "src")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    with pytest.raises(ModelError, match="full already holds something") as e:
        export(tmp_path / "src", tmp_path / "full")  # type: ignore[operator]
    assert e.value.hint == "give a folder that does not exist yet"
    with pytest.raises(ModelError, match="no model folder"):
        export(tmp_path / "absent", tmp_path / "dst")  # type: ignore[operator]

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fp8ctl.precision.export.save_file", no_space)
    monkeypatch.setattr("shutil.copyfile", no_space)
    with pytest.raises(ModelError, match=r"can't write .*dst: .*No space left") as e:
        export(tmp_path / "src", tmp_path / "dst")  # type: ignore[operator]
    assert e.value.hint == "free some space or choose another folder, then try again"
    assert sorted(os.listdir(tmp_path)) == ["full", "src"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "src")
    (tmp_path / "src/model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ModelError, match="model.safetensors can't be read"):
        export_fp8_block(tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()

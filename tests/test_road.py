"""The whole road through the command line, on a tiny model: conversations -> SFT -> eval -> export -> report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp8ctl.track.record import RunRecord

pytestmark = pytest.mark.slow

SUITE = [
    "suite=smoke",
    "suite.num_questions=1",
    "suite.max_new_tokens=8",
    "suite.families=[leg_counting,chain_sum,lcm]",
]


@pytest.fixture(scope="module")
def model_folder(tokenizer_folder, tmp_path_factory) -> Path:
    """Random weights of `model=tiny` with the test's tokenizer, as a Hugging Face folder."""
    from fp8ctl.config.compose import compose
    from fp8ctl.model.hf import save_hf
    from fp8ctl.model.transformer import Transformer

    folder = tmp_path_factory.mktemp("model") / "tiny"
    shape = compose("train_cpt", ["model=tiny", "model.shape.vocab_size=512"]).model.shape
    torch.manual_seed(0)
    save_hf(Transformer(shape).state_dict(), shape, folder, tokenizer_from=tokenizer_folder, dtype=torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def arms(fp8ctl, model_folder, tmp_path_factory) -> dict[str, Path]:
    """A BF16 and an FP8 run of the same fine-tuning, evaluated in both precisions."""
    work = tmp_path_factory.mktemp("road")
    fp8ctl(
        "data", "prep", "source=reasoning_gym", "sources.0.families=[leg_counting,chain_sum]", "chat_template=smollm2",
        "sources.0.num_per_family=20", f"tokenizer={model_folder}", f"out={work / 'data'}", "validation_share=0.1",
    )  # fmt: skip
    runs = {}
    for precision in ("bf16", "infir2"):
        runs[precision] = work / precision
        fp8ctl(
            "train", "sft", f"model.path={model_folder}", f"data.path={work / 'data'}", f"precision={precision}",
            "--run-dir", runs[precision], "loop.num_steps=12", "batch.seq_len_tokens=1024", "track.experiment=road",
            "engine.device=cpu", "optim.peak_lr=1e-3", "loop.validation_rows=1", "monitor.layer_stats_every_steps=6",
        )  # fmt: skip
        for inference in ("bf16", "infir2"):
            fp8ctl("eval", f"model={runs[precision]}", f"precision={inference}", *SUITE, "device=cpu")
    return runs


def test_every_piece_is_there(arms) -> None:
    record = RunRecord(arms["infir2"])
    assert record.json(record.paths.status)["state"] == "finished"
    losses = [s["loss"] for s in record.steps()]
    assert losses[-1] < losses[0] - 1, "twelve steps at this rate take more than a nat off random weights"
    assert (arms["infir2"].parent / "mlflow.db").exists()
    assert record.paths.root.joinpath("mlflow_run_id").read_text().strip()
    results = record.eval_results()
    assert {r["precision"] for r in results} == {"bf16", "fp8-infir2"}
    assert all(r["answers_received"] == r["answers_requested"] == 3 for r in results)


def test_metrics_reach_mlflow_as_they_stand_in_the_record(arms) -> None:
    from mlflow import MlflowClient

    run = arms["infir2"]
    client = MlflowClient(f"sqlite:///{run.parent / 'mlflow.db'}")
    run_id = (run / "mlflow_run_id").read_text().strip()
    history = {m.step: m.value for m in client.get_metric_history(run_id, "loss")}
    assert history == pytest.approx({s["step"]: s["loss"] for s in RunRecord(run).steps()})
    assert client.get_run(run_id).info.status == "FINISHED"
    assert client.get_run(run_id).data.params["optim.peak_lr"] == "0.001"


def test_the_report_compares_the_arms(fp8ctl, arms, tmp_path) -> None:
    done = fp8ctl(
        "report",
        arms["bf16"],
        arms["infir2"],
        "--json",
        "--html",
        tmp_path / "new/r.html",
        "--markdown",
        tmp_path / "r.md",
    )
    report = json.loads(done.stdout)
    assert report["verdict"]["verdict"] in ("parity", "worse", "undecided")
    html = (tmp_path / "new/r.html").read_text()
    assert "<svg" in html
    assert "not a speed claim" in html
    assert "not a speed claim" in (tmp_path / "r.md").read_text()
    shown = fp8ctl("report", arms["bf16"], arms["infir2"]).stdout
    assert "not a speed claim" in shown
    assert "Traceback" not in shown


def test_the_monitor_shows_a_run(fp8ctl, arms) -> None:
    shown = fp8ctl("monitor", "show", arms["infir2"]).stdout
    for text in ("finished", "loss", "grad"):
        assert text in shown


def test_the_export_loads_and_generates_in_transformers(fp8ctl, arms, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fp8ctl("export", arms["infir2"], tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("How many legs", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]


def test_the_block_export_holds_the_training_weights_rounded(fp8ctl, arms, tmp_path) -> None:
    from safetensors.torch import load_file

    from fp8ctl.engine.manifest import find_weights
    from fp8ctl.fp8.reference import dequantize

    done = fp8ctl("export", arms["infir2"], tmp_path / "fp8", "--format", "fp8-block")
    assert "of 15 linears in FP8" in done.stderr
    config = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    stored = load_file(tmp_path / "fp8/model.safetensors")
    trained = load_file(find_weights(arms["infir2"]) / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert stored[name].dtype == torch.float8_e4m3fn
    back = dequantize(stored[name], stored[f"{name}_scale_inv"])
    # E4M3 has four significant bits: half a step is 1/16 of a value, or of the smallest normal in its block
    error = (back - trained[name].float()).abs()
    assert (error <= trained[name].float().abs() / 16 + back.abs().max() * 2.0**-14).all()
    assert torch.equal(stored["model.norm.weight"], trained["model.norm.weight"])

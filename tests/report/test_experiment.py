"""When two runs are the same experiment."""

from __future__ import annotations

import json
from pathlib import Path

from fp8ctl.report.experiment import match
from fp8ctl.report.load import load_run


def differences(baseline: Path, candidate: Path) -> list[tuple[str, str, str, str]]:
    found = match(load_run(baseline, "A"), load_run(candidate, "B"))
    assert found.is_matched == (not found.differences)
    return [(d.key, d.baseline, d.candidate, d.kind) for d in found.differences]


def test_arms_that_differ_in_precision_name_and_tracking_match(make_run) -> None:
    fp8 = make_run("fp8", precision="infir2", config={"track.mlflow": True})
    assert differences(make_run("bf16"), fp8) == []


def test_every_other_setting_counts(make_run) -> None:
    other = make_run("other", precision="infir2", config={"seed": 7, "optim.peak_lr": 3e-4})
    assert differences(make_run("bf16"), other) == [
        ("seed", "1236", "7", "setting"),
        ("optim.peak_lr", "0.0001", "0.0003", "setting"),
    ]


def test_versions_and_hardware_count_and_another_commit_is_told(make_run) -> None:
    env = {
        "packages": {"torch": "2.11.0", "deepspeed": "0.19.8", "transformers": "5.24.0", "numpy": "2.4.6"},
        "git": {"commit": "fedcba", "is_dirty": True},
        "hostname": "other-box",
        "cpu": {"model": "Some CPU @ 2.0GHz", "cores": 2, "usable_cores": 1},
    }
    found = match(load_run(make_run("bf16"), "A"), load_run(make_run("fp8", precision="infir2", env=env), "B"))
    assert [(d.key, d.kind) for d in found.differences] == [("packages.torch", "environment")]
    assert found.notes == ["the runs were started at two commits, so their code may differ: 0123456789ab | fedcba"]


def test_another_gpu_counts_and_another_of_the_same_kind_does_not(make_run) -> None:
    def on(name: str, uuid: str) -> dict:
        return {"gpus": [{"name": name, "uuid": uuid}], "variables": {"CUDA_VISIBLE_DEVICES": uuid}}

    bf16 = make_run("bf16", env=on("NVIDIA H200", "0"))
    assert differences(bf16, make_run("fp8", env=on("NVIDIA H200", "1"))) == []
    assert differences(bf16, make_run("h100", env=on("NVIDIA H100", "0"))) == [
        ("gpus.0.name", "NVIDIA H200", "NVIDIA H100", "environment")
    ]


def test_batches_of_other_tokens_are_found_whatever_the_settings_say(make_run) -> None:
    bf16, fp8 = make_run("bf16"), make_run("fp8", precision="infir2")
    lines = (fp8 / "metrics.jsonl").read_text().splitlines()
    line = json.loads(lines[19])
    lines[19] = json.dumps({**line, "trainable_tokens": 2000})
    (fp8 / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert differences(bf16, fp8) == [("trainable_tokens of step 20", "2048", "2000", "data")]


def test_a_missing_config_is_no_match(make_run) -> None:
    fp8 = make_run("fp8", precision="infir2")
    (fp8 / "config.yaml").unlink()
    assert differences(make_run("bf16"), fp8) == [("config.yaml", "there", "missing", "setting")]


def weights(run: Path, step: str = "step-00000060") -> str:
    return str(run / "checkpoints" / step / "weights")


def test_arms_may_continue_their_own_matched_runs(make_run) -> None:
    cpt = [make_run("cpt-bf16"), make_run("cpt-fp8", precision="infir2")]
    sft = [
        make_run(f"sft{i}", stage="sft", precision=precision, config={"model.path": weights(run)})
        for i, (run, precision) in enumerate(zip(cpt, ("bf16", "infir2"), strict=True))
    ]
    found = match(load_run(sft[0], "A"), load_run(sft[1], "B"))
    assert found.is_matched
    assert found.notes == [f"each arm continues its own run of the stage before: {weights(cpt[0])} | {weights(cpt[1])}"]


def test_arms_that_continue_unmatched_runs_or_other_checkpoints_do_not_match(make_run) -> None:
    cpt = [make_run("cpt-bf16"), make_run("cpt-fp8", precision="infir2"), make_run("cpt-7", config={"seed": 7})]
    base = make_run("sft", stage="sft", config={"model.path": weights(cpt[0])})
    for name, path in (("x", weights(cpt[2])), ("y", weights(cpt[1], "step-00000030")), ("z", "/models/other")):
        other = make_run(f"sft-{name}", stage="sft", precision="infir2", config={"model.path": path})
        assert [key for key, *_ in differences(base, other)] == ["model.path"]


def test_equal_data_in_two_places_match(make_run, tmp_path: Path) -> None:
    for name, fingerprint in (("one", "f1"), ("two", "f1"), ("three", "f2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps({"fingerprint": fingerprint}))
    runs = {n: make_run(f"on-{n}", config={"data.path": str(tmp_path / n)}) for n in ("one", "two", "three")}
    found = match(load_run(runs["one"], "A"), load_run(runs["two"], "B"))
    assert found.is_matched and found.notes[0].startswith("the data lie in two places and have one fingerprint")
    assert [key for key, *_ in differences(runs["one"], runs["three"])] == ["data.path"]

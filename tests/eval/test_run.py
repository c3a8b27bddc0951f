"""Whole evaluations of a small model: results, kill and continue, two precisions, runs, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8ctl.config.schema import EvalConfig, PrecisionConfig, PrecisionRule
from fp8ctl.data.reasoning_gym import question
from fp8ctl.errors import ConfigError, Fp8ctlError, ModelError, PrecisionError
from fp8ctl.eval import run as module
from fp8ctl.eval.completions import Completion, Key
from fp8ctl.eval.generate import Generated, Request
from fp8ctl.eval.run import evaluate, judge, load_model
from fp8ctl.model.transformer import Transformer
from fp8ctl.paths import RunPaths
from fp8ctl.precision.apply import set_precision
from fp8ctl.track.record import RunRecord

FP8 = PrecisionConfig(default="fp8")
MakeRun = Callable[..., RunPaths]


def changed(config: EvalConfig, **changes: Any) -> EvalConfig:
    suite = {k.removeprefix("suite_"): changes.pop(k) for k in list(changes) if k.startswith("suite_")}
    return config.model_copy(update={**changes, "suite": config.suite.model_copy(update=suite)})


def completions(config: EvalConfig) -> list[Completion]:
    assert config.out is not None
    lines = (Path(config.out) / "completions.jsonl").read_text().splitlines()
    return [Completion(**json.loads(line)) for line in lines]


def raw(config: EvalConfig) -> bytes:
    assert config.out is not None
    return (Path(config.out) / "completions.jsonl").read_bytes()


def test_result_says_what_was_asked_what_came_and_what_ran(config: EvalConfig, model_folder: Path) -> None:
    calls: list[tuple[int, int, int]] = []
    result = evaluate(config, lambda *call: calls.append(call))
    answers = completions(config)

    assert result["answers_requested"] == result["answers_received"] == len(answers) == 9
    assert {a.finish_reason for a in answers} == {"stop", "length"}
    assert result["overall"]["truncated_share"] == sum(a.finish_reason == "length" for a in answers) / 9
    assert result["overall"]["mean_answer_tokens"] == sum(a.answer_tokens for a in answers) / 9
    assert result["overall"]["no_answer_share"] == 1.0 and result["overall"]["accuracy"] == 0.0
    assert list(result["families"]) == ["chain_sum", "lcm", "spell_backward"]
    assert all(f["num_questions"] == 3 and 0.5 < f["high"] < 0.6 for f in result["families"].values())
    assert [a.family for a in answers] == ["chain_sum"] * 3 + ["lcm"] * 3 + ["spell_backward"] * 3

    assert (result["name"], result["suite"], result["precision"]) == ("smoke-fp32", "smoke", "fp32")
    assert result["coverage"]["fp8_share"]["total"] == 0.0 and result["coverage"]["num_linears"] == 15
    assert result["model"]["path"] == str(model_folder) and result["model"]["fingerprint"].startswith("xxh3:")
    assert result["versions"]["reasoning-gym"] and result["seconds"] > 0 and result["tokens_per_second"] > 0

    tokens = sum(a.answer_tokens for a in answers)
    assert calls[0] == (0, 9, 0) and calls[-1] == (9, 9, tokens)
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)
    assert json.loads((Path(config.out or "") / "result.json").read_text()) == result


@pytest.mark.parametrize(
    "sampling", [{}, {"suite_temperature": 1.2, "suite_num_samples": 2}], ids=["greedy", "sampled"]
)
def test_answers_are_the_same_bytes_whatever_the_batch_size(
    config: EvalConfig, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    config = changed(config, **sampling)
    files = []
    for batch_size in (1, 5, 16):
        one = changed(config, batch_size=batch_size, out=str(tmp_path / str(batch_size)))
        evaluate(one)
        files.append(raw(one))
    assert files[0] == files[1] == files[2]


def test_samples_are_averaged_by_question(config: EvalConfig) -> None:
    result = evaluate(changed(config, suite_num_samples=3, suite_temperature=1.0, batch_size=8))
    assert (result["overall"]["num_questions"], result["overall"]["num_answers"]) == (9, 27)
    assert len({(a.index, a.text) for a in completions(config)}) > 20, "samples have streams of their own"


def test_killed_evaluation_goes_on_to_the_same_bytes(config: EvalConfig, tmp_path: Path) -> None:
    whole = changed(config, out=str(tmp_path / "whole"), batch_size=4)
    evaluate(whole)

    def interrupt(done: int, total: int, tokens: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(config, interrupt)
    assert 4 <= len(completions(config)) < 9 and not (Path(config.out or "") / "result.json").exists()
    result = evaluate(changed(config, batch_size=3))
    assert raw(config) == raw(whole)
    assert 4 <= result["answers_resumed"] < 9 and result["answers_received"] == 9


def test_finished_evaluation_is_not_run_again(config: EvalConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluate(config)
    monkeypatch.setattr(module, "load_model", lambda job: pytest.fail("nothing is left to do"))
    assert evaluate(changed(config, batch_size=2)) == first
    # killed between the last answer and the result: nothing ran, so nothing is claimed about coverage or speed
    (Path(config.out or "") / "result.json").unlink()
    again = evaluate(config)
    assert again["overall"] == first["overall"] and again["answers_resumed"] == 9
    assert again["coverage"] is None and again["tokens_per_second"] is None


def test_other_settings_never_mix(config: EvalConfig) -> None:
    evaluate(config)
    for other, names in [
        (changed(config, suite_temperature=0.5), "protocol.suite.temperature is 0.0 there, 0.5 now"),
        (changed(config, precision=FP8), 'precision.default is "bf16" there, "fp8" now'),
        (changed(config, dtype="bf16"), 'dtype is "fp32" there, "bf16" now'),
        (changed(config, seed=1), "protocol.seed is 1236 there, 1 now"),
    ]:
        with pytest.raises(ConfigError) as caught:
            evaluate(other)
        assert names in caught.value.message and "give another name=NAME" in (caught.value.hint or "")


def test_two_precisions_of_one_checkpoint(make_run: MakeRun, config: EvalConfig, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    config = changed(config, model=str(paths.root), out=None, dtype="bf16")
    bf16 = evaluate(config)
    fp8 = evaluate(changed(config, precision=FP8.model_copy(update={"require_fp8": True, "head": "fp8"})))

    assert sorted(p.name for p in paths.eval.iterdir()) == ["smoke-bf16", "smoke-fp8-infir2"]
    assert [r["name"] for r in RunRecord(paths.root).eval_results()] == ["smoke-bf16", "smoke-fp8-infir2"]
    assert bf16["model"] == fp8["model"] and bf16["model"]["step"] == 10
    assert bf16["protocol_hash"] == fp8["protocol_hash"] and bf16["settings_hash"] != fp8["settings_hash"]
    assert (bf16["coverage"]["fp8_linears"], fp8["coverage"]["fp8_linears"]) == (0, 15)
    assert fp8["coverage"]["fp8_share"]["total"] == 1.0 and fp8["backend"]["name"] == "reference"
    assert bf16["training_data"] == {"checked": [], "unknown": [f"{paths.root}: its config.yaml names no data set"]}


def test_required_fp8_that_did_not_run_stores_no_answer(config: EvalConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_with_one_in_bf16(job: module.Job) -> Transformer:
        model = load_model(job)
        set_precision(model, "model.layers.1.mlp.up_proj", "bf16")
        return model

    monkeypatch.setattr(module, "load_model", load_with_one_in_bf16)
    with pytest.raises(
        PrecisionError, match=r"less ran in FP8 than planned: .*layers\.1\.mlp\.up_proj fprop ran in BF16"
    ):
        evaluate(changed(config, precision=FP8.model_copy(update={"require_fp8": True})))
    assert not (Path(config.out or "") / "completions.jsonl").exists()
    result = evaluate(changed(config, precision=FP8))
    assert (result["coverage"]["fp8_linears"], result["coverage"]["num_linears"]) == (13, 15)


def test_fp8_answers_do_not_depend_on_the_batch_either(config: EvalConfig, tmp_path: Path) -> None:
    # tiles lie inside one token, so its neighbours can't change how it is quantised
    files = []
    for batch_size in (1, 5):
        one = changed(config, precision=FP8, batch_size=batch_size, out=str(tmp_path / str(batch_size)))
        evaluate(one)
        files.append(raw(one))
    assert files[0] == files[1]


def test_plain_folder_gets_its_result_here(config: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evaluate(changed(config, out=None, name="first"))
    assert (tmp_path / "eval-first" / "result.json").exists()


def test_run_is_asked_with_the_template_it_was_tuned_with(
    make_run: MakeRun, config: EvalConfig, tmp_path: Path
) -> None:
    from fp8ctl.data.manifest import Manifest

    data = tmp_path / "data"
    data.mkdir()
    Manifest(
        kind="sft", tokenizer_fingerprint="", vocab_size=1, max_token_id=0, eos_id=0, splits={}, counters={},
        prepared={"chat_template": "qwen2_5"}, fp8ctl_version="0",
    ).write(data)  # fmt: skip
    config = changed(config, model=str(make_run(tmp_path / "run", data=data).root), suite_system_prompt="")
    job = module.prepare(config)
    text = job.prompter.tokenizer.decode(list(job.requests[0].prompt_ids))
    assert text.startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")
    assert module.prepare(changed(config, chat_template="smollm2")).prompter.template.name == "smollm2"


@pytest.mark.parametrize(
    ("text", "answer", "points"),
    [
        ("<answer>{}</answer>", "{}", 1.0),
        ("well, <answer>no</answer> or rather <answer> {} </answer>.", "{}", 1.0),
        ("{}", None, 0.0),
        ("<answer>{}", None, 0.0),
        ("<answer></answer>", "", 0.0),
        ("<answer>{} or so</answer>", "{} or so", 0.0),
    ],
)
def test_judging(text: str, answer: str | None, points: float) -> None:
    asked = question("spell_backward", 3, 0)
    request = Request(Key("spell_backward", 0, 0), (1, 2, 3))
    done = judge(asked, Generated(request, (7, 8), 3, "stop"), text.format(asked.answer))
    assert done.answer == (None if answer is None else answer.format(asked.answer))
    assert (done.score, done.prompt_tokens, done.answer_tokens) == (points, 3, 3)


def refuses(config: EvalConfig, error: type[Fp8ctlError], message: str, hint: str) -> None:
    with pytest.raises(error) as caught:
        evaluate(config)
    assert message in caught.value.message and hint in (caught.value.hint or "")
    assert not Path(config.out or "").exists(), "nothing is written before everything is checked"


def test_what_is_refused_before_weights_are_loaded(
    config: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_model", lambda job: pytest.fail("weights were loaded"))
    refuses(changed(config, model=None), ConfigError, "no model to evaluate", "model=RUN")
    refuses(changed(config, model=str(tmp_path / "no")), ModelError, "no does not exist", "give a run folder")
    refuses(changed(config, suite_families=()), ConfigError, "suite smoke has no questions", "suite=smoke")
    refuses(
        changed(config, suite_families=("lcms",)),
        ConfigError,
        "unknown reasoning-gym family: lcms",
        "did you mean lcm?",
    )
    refuses(
        changed(config, suite_max_new_tokens=500),
        ModelError,
        "exceed the model's 512 positions",
        "suite.max_new_tokens=",
    )
    rule = PrecisionRule(match="model.layer.0.*", precision="bf16", reason="test")
    refuses(
        changed(config, precision=FP8.model_copy(update={"rules": (rule,)})),
        PrecisionError,
        "matches no linear",
        "precision.rules",
    )
    nothing = PrecisionConfig(require_fp8=True)
    refuses(changed(config, precision=nothing), PrecisionError, "FP8 is required", "choose precision=infir2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuses(changed(config, device="cuda"), ConfigError, "device=cuda, but torch sees no GPU", "fp8ctl doctor")

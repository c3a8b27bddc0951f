"""One evaluation from settings to result.json: find, ask, generate, judge, sum up.

Whatever can be refused is refused before weights are loaded; answers are on disk as soon as they end; the result says what
really ran. Answers depend on `settings.json` alone, so a run again with the same settings goes on or gives the stored result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fp8ctl
from fp8ctl.config.checks import check_precision
from fp8ctl.config.problems import raise_problems
from fp8ctl.config.schema import EvalConfig, ModelShape
from fp8ctl.data.reasoning_gym import SYSTEM_PROMPT, RgQuestion, extract_answer, score
from fp8ctl.errors import ConfigError
from fp8ctl.eval.completions import Completion, CompletionStore, Key, hash_settings
from fp8ctl.eval.generate import Generated, Protocol, Request, generate, shared_tokens
from fp8ctl.eval.lineage import TrainingData, read_training_data
from fp8ctl.eval.prompts import Prompter, check_prompts
from fp8ctl.eval.sampling import Sampling
from fp8ctl.eval.suite import build_questions
from fp8ctl.eval.summary import by_family, summarize
from fp8ctl.eval.target import Target, find_target, fingerprint
from fp8ctl.fp8.backend import Backend, choose_backend
from fp8ctl.model.hf import load_hf, read_shape
from fp8ctl.model.transformer import Transformer
from fp8ctl.paths import RunPaths
from fp8ctl.precision.apply import apply_plan
from fp8ctl.precision.coverage import Coverage, check_required, coverage
from fp8ctl.precision.plan import PrecisionPlan, make_plan
from fp8ctl.track.environment import package_versions
from fp8ctl.track.record import write_json

Progress = Callable[[int, int, int], None]
"""Called with the answers that are there, the answers asked for, and the tokens generated so far in this process."""

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Job:
    """Everything an evaluation needs besides weights, checked."""

    config: EvalConfig
    target: Target
    shape: ModelShape
    plan: PrecisionPlan
    backend: Backend
    device: torch.device
    prompter: Prompter
    questions: dict[tuple[str, int], RgQuestion]
    requests: list[Request]
    protocol: Protocol
    training_data: TrainingData
    """What is known of the data behind the model."""
    settings: dict[str, Any]
    """All that can change an answer, as plain data; batch size is not among it."""

    @property
    def precision(self) -> str:
        """Short name of the precision of inference, e.g. `bf16` or `fp8-infir2`."""
        return f"fp8-{self.plan.recipe.name}" if self.plan.fp8_linears else self.config.dtype

    @property
    def name(self) -> str:
        """Name of the result."""
        return self.config.name or f"{self.config.suite.name}-{self.precision}"

    @property
    def out(self) -> Path:
        """Folder of the result."""
        if self.config.out is not None:
            return Path(self.config.out)
        return RunPaths(self.target.run).eval / self.name if self.target.run else Path(f"eval-{self.name}")


@dataclass
class Work:
    """What this process did for the result; answers that were there before are not part of it."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    coverage: Coverage | None = None


def evaluate(config: EvalConfig, progress: Progress = lambda done, total, tokens: None) -> dict[str, Any]:
    """Runs an evaluation, or goes on with one that was stopped; gives the content of result.json.

    Writes settings.json, completions.jsonl and result.json into the folder of the result. Keys of the result: `overall` and
    `families` hold accuracies (see `summary.summarize`); `coverage` is what ran in FP8, counted at the GEMMs of this process
    (null when all answers were there already); `seconds` is wall time of generation, prompts included and loading left out.
    Two results with one `protocol_hash` asked the same questions in the same way.

    Raises:
        ConfigError, DataError, ModelError, PrecisionError: the settings, the suite, the model or the folder don't do.
    """
    job = prepare(config)
    with CompletionStore(job.out, job.settings) as store:
        if (stored := _stored_result(job, store)) is not None:
            progress(len(job.requests), len(job.requests), 0)
            return stored
        work = _answer(job, store, progress)
        completions = store.close_with([r.key for r in job.requests])
        result = _result(job, completions, work)
        write_json(store.result_path, result)
    return result


def prepare(config: EvalConfig) -> Job:
    """Finds and checks everything but the weights."""
    raise_problems(check_precision(config.precision))
    suite = config.suite
    questions = {(q.family, q.index): q for q in build_questions(suite)}
    target = find_target(config.model)
    training_data = read_training_data(suite, target.run)
    device = choose_device(config.device)
    shape = read_shape(target.weights)
    with torch.device("meta"):
        plan = make_plan(Transformer(shape), config.precision)
    precision = config.precision
    backend = choose_backend(precision.backend, recipe=precision.recipe, device_type=device.type, gemm=precision.gemm)

    template = config.chat_template or training_data.chat_template
    prompter = Prompter(target.weights, template, training_data.default_system)
    system = SYSTEM_PROMPT if suite.system_prompt is None else suite.system_prompt
    prompts = {key: prompter.prompt_ids(q.question, system) for key, q in questions.items()}
    check_prompts(list(prompts.values()), shape, suite.max_new_tokens)
    requests = [Request(Key(*q, sample), ids) for q, ids in prompts.items() for sample in range(suite.num_samples)]
    protocol = Protocol(
        Sampling(suite.temperature, suite.top_p),
        config.seed,
        prompter.stop_ids(),
        suite.max_new_tokens,
        # of all prompts, so that an evaluation that goes on computes as the one that was stopped
        shared_tokens=shared_tokens(list(prompts.values())),
    )
    settings = {
        "protocol": {
            "suite": {**suite.model_dump(mode="json", exclude={"name"}), "system_prompt": system},
            "seed": config.seed,
            "stop_ids": sorted(protocol.stop_ids),
            "prompts": hash_settings([[*key, list(ids)] for key, ids in prompts.items()]),
            "reasoning_gym": package_versions(["reasoning-gym"]).get("reasoning-gym"),
        },
        "model": fingerprint(target.weights),
        "precision": {**config.precision.model_dump(mode="json", exclude={"require_fp8"}), "backend": backend.name},
        "dtype": config.dtype,
        "device": device.type,
    }
    return Job(
        config, target, shape, plan, backend, device, prompter, questions, requests, protocol, training_data, settings
    )


def choose_device(asked: str) -> torch.device:
    """The device to evaluate on.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise ConfigError("device=cuda, but torch sees no GPU", "run `fp8ctl doctor`, or set device=auto")
    return torch.device("cuda" if has_gpu and asked != "cpu" else "cpu")


def load_model(job: Job) -> Transformer:
    """The model with its weights, its linears in the planned precision and counted."""
    model = load_hf(job.target.weights, dtype=_DTYPES[job.config.dtype], device=job.device).eval()
    apply_plan(model, job.plan, job.config.precision, backend=job.backend, weights_are_frozen=True)
    return model


def judge(asked: RgQuestion, generated: Generated, text: str) -> Completion:
    """An answer with its score."""
    key = generated.request.key
    return Completion(
        family=key.family,
        index=key.index,
        sample=key.sample,
        question=asked.question,
        expected=asked.answer,
        text=text,
        answer=extract_answer(text),
        score=score(asked, text),
        finish_reason=generated.finish_reason,
        prompt_tokens=len(generated.request.prompt_ids),
        answer_tokens=generated.num_tokens,
    )


def _answer(job: Job, store: CompletionStore, progress: Progress) -> Work:
    """Generates and stores the answers that are not there yet."""
    work, total = Work(), len(job.requests)
    missing = [r for r in job.requests if r.key not in store.completions]
    progress(total - len(missing), total, 0)
    if not missing:
        return work
    model = load_model(job)

    def count(tokens: int) -> None:
        work.tokens += tokens
        progress(len(store.completions), total, work.tokens)

    start = time.perf_counter()
    for generated in generate(model, missing, job.protocol, batch_size=job.config.batch_size, on_tokens=count):
        key = generated.request.key
        text = job.prompter.tokenizer.decode(list(generated.token_ids))
        if job.config.precision.require_fp8:
            # before anything is stored: a later run would go on from answers that nobody asked for
            check_required(job.plan, coverage(model))
        store.add(judge(job.questions[key.family, key.index], generated, text))
        work.answers += 1
        progress(len(store.completions), total, work.tokens)
    work.seconds = time.perf_counter() - start
    work.coverage = coverage(model)
    return work


def _stored_result(job: Job, store: CompletionStore) -> dict[str, Any] | None:
    """The result of an evaluation that is already whole."""
    if len(store.completions) < len(job.requests) or not store.result_path.exists():
        return None
    return json.loads(store.result_path.read_text(encoding="utf-8"))


def _result(job: Job, completions: list[Completion], work: Work) -> dict[str, Any]:
    done = None
    if work.coverage is not None:
        done = work.coverage.to_json()
        del done["linears"]  # a table per linear belongs to a run; here the shares are enough
    return {
        "schema": 1,
        "name": job.name,
        "suite": job.config.suite.name,
        "precision": job.precision,
        "overall": summarize(completions),
        "families": by_family(completions),
        "model": {
            "path": str(job.target.weights),
            "run": str(job.target.run) if job.target.run else None,
            "step": job.target.step,
            "fingerprint": job.settings["model"],
        },
        "dtype": job.config.dtype,
        "device": torch.cuda.get_device_name() if job.device.type == "cuda" else "cpu",
        "plan": job.plan.summary(),
        "backend": {"name": job.backend.name, "reason": job.backend.reason},
        "coverage": done,
        "training_data": {"checked": list(job.training_data.checked), "unknown": list(job.training_data.unknown)},
        "answers_requested": len(job.requests),
        "answers_received": len(completions),
        "answers_resumed": len(completions) - work.answers,
        "batch_size": job.config.batch_size,
        "seconds": round(work.seconds, 3),
        "tokens_per_second": round(work.tokens / work.seconds, 1) if work.seconds else None,
        "protocol": job.settings["protocol"],
        "protocol_hash": hash_settings(job.settings["protocol"]),
        "settings_hash": hash_settings(job.settings),
        "versions": {"fp8ctl": fp8ctl.__version__, **package_versions()},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }

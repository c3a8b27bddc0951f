from __future__ import annotations

import pytest

from fp8ctl.config.compose import compose, dotted_names, dump, groups, load, validate
from fp8ctl.config.schema import TrainConfig
from fp8ctl.errors import ConfigError


def test_overrides_and_groups_reach_the_tree() -> None:
    config = compose("train_cpt", ["model=tiny", "precision=infir2", "optim.peak_lr=3e-4", "batch.global_batch_rows=8"])
    assert (config.stage, config.model.shape.hidden_size, config.precision.default) == ("cpt", 128, "fp8")
    assert (config.optim.peak_lr, config.batch.global_batch_rows, config.precision.recipe.wgrad) == (3e-4, 8, "fp8")
    assert compose("train_sft").stage == "sft"


def test_lists_of_sources_can_be_overridden_by_number() -> None:
    config = compose("data_prep", ["source=cpt_local", "sources.0.paths=[a.jsonl,b.jsonl]", "sources.0.kind=text"])
    assert config.sources[0].paths == ("a.jsonl", "b.jsonl")
    assert config.sources[0].kind == "text"


def test_all_unknown_names_are_reported_at_once_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as e:
        compose("train_cpt", ["optim.peek_lr=1", "precision=infr2", "modle=tiny", "loop.steps=5"])
    assert "4 problems" in e.value.message
    for text in ("optim.peek_lr: unknown setting", "precision: no choice named 'infr2'", "modle: unknown setting"):
        assert text in e.value.message
    assert "did you mean optim.peak_lr?" in e.value.hint
    assert "infir2" in e.value.hint
    assert "did you mean model?" in e.value.hint


def test_a_leaf_under_the_wrong_parent_is_found() -> None:
    with pytest.raises(ConfigError) as e:
        compose("train_cpt", ["schedule.peak_lr=1"])
    assert e.value.hint == "did you mean optim.peak_lr?"


def test_wrong_types_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as e:
        compose("train_cpt", ["optim.peak_lr=abc", "batch.seq_len_tokens=-3", "engine.zero_stage=7"])
    assert "optim.peak_lr: input should be a valid number" in e.value.message
    assert "got 'abc'" in e.value.message
    assert "batch.seq_len_tokens" in e.value.message
    assert "engine.zero_stage" in e.value.message


@pytest.mark.parametrize("text", ["a b", "=", "optim.peak_lr"])
def test_a_broken_override_gets_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError) as e:
        compose("train_cpt", [text])
    assert "not an override" in e.value.message
    assert "name=value" in e.value.hint


def test_sweeps_are_refused() -> None:
    with pytest.raises(ConfigError, match="sweeps are not supported"):
        compose("train_cpt", ["loop.num_steps=1,2"])


def test_settings_survive_the_file(tmp_path) -> None:
    config = compose("train_cpt", ["model=llama3_2_1b", "precision=infir2_first_block_bf16", "data.path=/x"])
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(TrainConfig, tmp_path / "config.yaml") == config


def test_a_missing_or_foreign_file_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no settings at"):
        load(TrainConfig, tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("stage: cpt\nflavour: sweet\n")
    with pytest.raises(ConfigError, match="flavour: unknown setting"):
        load(TrainConfig, tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(TrainConfig, tmp_path / "config.yaml")


def test_settings_are_frozen() -> None:
    config = validate(TrainConfig, {})
    with pytest.raises(Exception, match="frozen"):
        config.seed = 3


def test_every_setting_has_a_docstring() -> None:

    from fp8ctl.config import schema

    for kind in vars(schema).values():
        if isinstance(kind, type) and issubclass(kind, schema.Settings):
            for name, info in kind.model_fields.items():
                is_group = isinstance(info.annotation, type) and issubclass(info.annotation, schema.Settings)
                assert is_group or info.description, f"{kind.__name__}.{name} has no docstring"


def test_dotted_names_and_groups() -> None:
    names = dotted_names(TrainConfig)
    assert "model.shape.rope_scaling.factor" in names
    assert "precision.rules" in names
    assert "infir2" in groups()["precision"]


def test_plain_setting_named_like_a_group_takes_a_path() -> None:
    config = compose("eval", ["model=runs/a b/step-00000010", "precision=infir2", "suite.num_questions=3"])
    assert (config.model, config.precision.default) == ("runs/a b/step-00000010", "fp8")
    assert compose("eval", ["model=smollm2_135m"]).model == "smollm2_135m"

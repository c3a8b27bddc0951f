"""Command + Hydra overrides -> one frozen tree of settings.

The defaults of `schema.py` are the base node, the YAML files of `conf/` change what differs, overrides come last. The parent
process does this once; ranks read the resolved file (`load`) and never compose.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fp8ctl.config.bench_schema import BenchArmConfig, BenchDataConfig, BenchGemmConfig, BenchStepConfig
from fp8ctl.config.data_schema import DataPrepConfig, DecontaminateConfig, DedupConfig, InspectConfig
from fp8ctl.config.problems import Problem, nearest, raise_problems
from fp8ctl.config.schema import EvalConfig, TrainConfig
from fp8ctl.config.settings import Settings
from fp8ctl.errors import ConfigError
from fp8ctl.paths import conf_dir

COMMANDS: dict[str, type[Settings]] = {
    "train_cpt": TrainConfig,
    "train_sft": TrainConfig,
    "data_prep": DataPrepConfig,
    "data_dedup": DedupConfig,
    "data_decontaminate": DecontaminateConfig,
    "data_inspect": InspectConfig,
    "eval": EvalConfig,
    "bench_gemm": BenchGemmConfig,
    "bench_data": BenchDataConfig,
    "bench_step": BenchStepConfig,
    "bench_arm": BenchArmConfig,
}


def compose(command: str, overrides: Sequence[str] = ()) -> Any:
    """Composes the settings of one command.

    Args:
        command: one of `COMMANDS` (the root file `conf/<command>.yaml`).
        overrides: Hydra override strings such as `optim.peak_lr=1e-4` or `precision=infir2`.

    Raises:
        ConfigError: unknown names (with the nearest known one), bad syntax, wrong types: all problems at once.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = COMMANDS[command]
    _check_names(command, schema, overrides)
    not_hydra = [o for o in overrides if _is_out_of_reach(o.split("=", 1)[0], schema)]
    # Tuples become lists: OmegaConf knows no tuples.
    ConfigStore.instance().store(name=f"{command}_schema", node=OmegaConf.create(schema().model_dump(mode="json")))
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            tree = hydra_compose(config_name=command, overrides=[o for o in overrides if o not in not_hydra])
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(
            _first_lines(e), "see `fp8ctl COMMAND --help` and the files of conf/ for what can be set"
        ) from None
    finally:
        GlobalHydra.instance().clear()
    for override in not_hydra:
        _set_plain(plain, override)
    return validate(schema, plain)


def validate(schema: type[Settings], plain: Any) -> Any:
    """Plain data -> settings; all wrong types and unknown keys are reported at once as a ConfigError."""
    try:
        return schema.model_validate(plain)
    except ValidationError as e:
        known = dotted_names(schema)
        problems = []
        for err in e.errors():
            field = ".".join(str(part) for part in err["loc"])
            if err["type"] == "extra_forbidden":
                near = nearest(field, known)
                problems.append(Problem(field, "unknown setting", f"did you mean {near}?" if near else ""))
            else:
                got = "" if isinstance(err.get("input"), (dict, list)) else f", got {err.get('input')!r}"
                problems.append(Problem(field, err["msg"][:1].lower() + err["msg"][1:] + got))
        raise_problems(problems)
        raise AssertionError("unreachable") from e


def load(schema: type[Settings], path: Path) -> Any:
    """Reads a resolved `config.yaml` back.

    Raises:
        ConfigError: no such file, not YAML, or not settings of this version.
    """
    import yaml

    if not path.exists():
        raise ConfigError(f"no settings at {path}", "give a run folder made by `fp8ctl train`")
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise ConfigError(f"{path} is not YAML: {_first_lines(e)}") from None
    return validate(schema, plain)


def change(settings: Any, overrides: Sequence[str]) -> Any:
    """Applies value overrides to settings that are resolved already; groups can't be chosen again.

    Raises:
        ConfigError: unknown or wrongly typed settings, or a group choice.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    schema = type(settings)
    command = next(name for name, kind in COMMANDS.items() if kind is schema)
    _check_names(command, schema, overrides)
    tree, problems = OmegaConf.create(settings.model_dump(mode="json")), []
    for text in overrides:
        override = OverridesParser.create().parse_override(text)
        if override.key_or_group in groups() and not _is_out_of_reach(override.key_or_group, schema):
            problems.append(
                Problem(override.key_or_group, "groups can't be chosen again in a stored run", "set the single values")
            )
        else:
            OmegaConf.update(tree, override.key_or_group, override.value())
    raise_problems(problems)
    return validate(schema, OmegaConf.to_container(tree))


def dump(settings: Settings) -> str:
    """Settings as YAML, every value written out."""
    import yaml

    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def dotted_names(schema: type[Settings], prefix: str = "") -> list[str]:
    """All settings of a tree as dotted names, groups included."""
    names = []
    for field, info in schema.model_fields.items():
        names.append(prefix + field)
        for inner in _settings_types(info.annotation):
            names += dotted_names(inner, f"{prefix}{field}.")
    return names


def groups() -> dict[str, list[str]]:
    """Config groups of conf/ and the choices in each."""
    found: dict[str, list[str]] = {}
    for file in sorted(conf_dir().rglob("*.yaml")):
        parent = file.parent.relative_to(conf_dir()).as_posix()
        if parent != ".":
            found.setdefault(parent, []).append(file.stem)
    return found


def _settings_types(annotation: Any) -> list[type[Settings]]:
    # X | None unwraps to X; lists of settings are not addressable by dotted override, so they stay out
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return [t for arg in typing.get_args(annotation) for t in _settings_types(arg)]
    return []


def _check_names(command: str, schema: type[Settings], overrides: Sequence[str]) -> None:
    """Reports every unknown setting, group and choice before Hydra stops at the first."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    known, choices = dotted_names(schema), groups()
    parser, problems = OverridesParser.create(), []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as e:
            problems.append(
                Problem(
                    repr(text),
                    f"not an override: {_first_lines(e)}",
                    "write name=value, for example optim.peak_lr=1e-4",
                )
            )
            continue
        name = override.key_or_group
        if not name:
            problems.append(Problem(repr(text), "not an override", "write name=value, for example optim.peak_lr=1e-4"))
        elif override.is_sweep_override():
            problems.append(
                Problem(name, "sweeps are not supported here", "give one value, or start one command per value")
            )
        elif name in choices and not _is_out_of_reach(name, schema):
            if override.value() not in choices[name] and not isinstance(override.value(), dict):
                listed = ", ".join(choices[name])
                problems.append(Problem(name, f"no choice named {override.value()!r}", f"{name} can be {listed}"))
        elif name not in known and name.split(".")[0] not in ("hydra",) and not _inside_list(name, known):
            near = nearest(name, [*known, *choices])
            problems.append(
                Problem(name, "unknown setting", f"did you mean {near}?" if near else f"see conf/{command}.yaml")
            )
    raise_problems(problems)


def _inside_list(name: str, known: list[str]) -> bool:
    # sources.0.paths: an element of a list; pydantic judges what is below it
    parts = name.split(".")
    return any(part.isdigit() and ".".join(parts[:i]) in known for i, part in enumerate(parts))


def _is_out_of_reach(name: str, schema: type[Settings]) -> bool:
    """Whether Hydra can't set this: an element of a list, or a plain setting named like a group (`model` of `fp8ctl eval`)."""
    field = schema.model_fields.get(name)
    is_shadowed = field is not None and name in groups() and not _settings_types(field.annotation)
    return is_shadowed or _inside_list(name, dotted_names(schema))


def _set_plain(plain: Any, text: str) -> None:
    """Applies an override that is out of Hydra's reach to composed plain data."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(text)
    *parents, leaf = override.key_or_group.split(".")
    node = plain
    for part in parents:
        try:
            node = node[int(part)] if part.isdigit() else node[part]
        except IndexError:
            hint = f"the list has {len(node)} elements, counted from 0; choose a source= that has some, or set the whole list"
            raise ConfigError(f"{override.key_or_group}: no element {part}", hint) from None
    node[leaf] = override.value()


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2])

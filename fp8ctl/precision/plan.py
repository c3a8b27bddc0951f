"""The precision plan: what every linear of a model runs in, and the reason."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from rich.table import Table
from torch import nn

from fp8ctl.config.schema import PrecisionConfig, PrecisionRule, RecipeConfig
from fp8ctl.errors import PrecisionError

Precision = Literal["fp8", "bf16"]

HEAD = "lm_head"
"""Last part of the output head's name, as Hugging Face has it."""


@dataclass(frozen=True)
class LinearPlan:
    """What one linear runs in."""

    fqn: str
    """Dotted module name."""
    precision: Precision
    reason: str
    out_features: int
    in_features: int

    @property
    def num_weights(self) -> int:
        """Elements of the weight; the FLOPs of each of its GEMMs are twice that per token."""
        return self.out_features * self.in_features


@dataclass(frozen=True)
class PrecisionPlan:
    """All linears in the model's order, the head included, and the recipe of those that run in FP8."""

    recipe: RecipeConfig
    linears: tuple[LinearPlan, ...]

    @property
    def fp8_linears(self) -> tuple[LinearPlan, ...]:
        """Those that run in FP8."""
        return tuple(linear for linear in self.linears if linear.precision == "fp8")

    @property
    def fp8_flops_share(self) -> float:
        """Share of the linear GEMM FLOPs of training, without recomputation, that the plan runs in FP8."""
        total = sum(linear.num_weights for linear in self.linears)
        fp8 = sum(linear.num_weights for linear in self.fp8_linears)
        directions = 3 if self.recipe.wgrad == "fp8" else 2
        return fp8 * directions / (3 * total) if total else 0.0

    def in_bf16(self, reason: str) -> PrecisionPlan:
        """The plan with nothing in FP8, those that were for this reason."""
        linears = tuple(
            replace(linear, precision="bf16", reason=reason) if linear.precision == "fp8" else linear
            for linear in self.linears
        )
        return PrecisionPlan(self.recipe, linears)

    def summary(self) -> str:
        """One line, e.g. `infir2: 210 of 211 linears in FP8, 79.0 % of the linear GEMM FLOPs`."""
        if not self.fp8_linears:
            return f"bf16: none of {len(self.linears)} linears in FP8"
        return (
            f"{self.recipe.name}: {len(self.fp8_linears)} of {len(self.linears)} linears in FP8, "
            f"{100 * self.fp8_flops_share:.1f} % of the linear GEMM FLOPs"
        )

    def table(self) -> Table:
        """The plan for a terminal; linears that differ only in the number of their block share a line."""
        table = Table("linears", "number", "out x in", "precision", "reason")
        groups: dict[tuple[str, str, str, str], list[str]] = {}
        for linear in self.linears:
            size = f"{linear.out_features} x {linear.in_features}"
            numberless = re.sub(r"\.\d+\.", ".*.", linear.fqn)
            groups.setdefault((numberless, size, linear.precision, linear.reason), []).append(linear.fqn)
        for (numberless, size, precision, reason), fqns in groups.items():
            name = numberless.replace("*", _ranges(fqns), 1)
            table.add_row(name, str(len(fqns)), size, precision.upper(), reason)
        return table

    def to_json(self) -> dict[str, Any]:
        """Content of plan.json."""
        return {
            "schema": 1,
            "summary": self.summary(),
            "recipe": self.recipe.model_dump(mode="json"),
            "fp8_flops_share": self.fp8_flops_share,
            "linears": [asdict(linear) for linear in self.linears],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PrecisionPlan:
        """Inverse of `to_json`.

        Raises:
            PrecisionError: the content is no plan of this version.
        """
        try:
            if content["schema"] != 1:
                raise ValueError(f"schema {content['schema']}")
            linears = tuple(LinearPlan(**linear) for linear in content["linears"])
            if bad := [linear.fqn for linear in linears if linear.precision not in ("fp8", "bf16")]:
                raise ValueError(f"precision of {bad[0]}")
            return cls(RecipeConfig(**content["recipe"]), linears)
        except (KeyError, TypeError, ValueError) as e:
            raise PrecisionError(f"not a precision plan: {e}", "use a plan.json that this version wrote") from e


def make_plan(model: nn.Module, config: PrecisionConfig) -> PrecisionPlan:
    """Plans every nn.Linear of the model (its weights may be on the meta device), and its tied head if it has one.

    A tied head is a module of class `TiedHead`; the weight's shape is `model.head_weight`'s.

    Raises:
        PrecisionError: see `plan_linears`.
    """
    sizes: dict[str, tuple[int, int]] = {}
    tied_head = None
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            sizes[fqn] = (module.out_features, module.in_features)
        elif is_tied_head(module):
            tied_head = fqn
            sizes[fqn] = tuple(model.head_weight.shape)  # type: ignore[assignment, union-attr, arg-type]
    return plan_linears(sizes, config, tied_head=tied_head)


def is_tied_head(module: nn.Module) -> bool:
    """Whether this is `model.transformer.TiedHead`: an output head that multiplies by the embedding's weight."""
    return type(module).__name__ == "TiedHead"


def plan_linears(
    sizes: Mapping[str, tuple[int, int]], config: PrecisionConfig, *, tied_head: str | None = None
) -> PrecisionPlan:
    """Plans linears given by name and (out_features, in_features).

    The last rule that matches a linear decides, the head included; otherwise `precision.default`, and `precision.head`
    for the head. A tied head stays BF16: its weight is the embedding's, which is never FP8.

    Raises:
        PrecisionError: a rule matches no linear, a tied head is asked to be FP8, FP8 is required and nothing would run
            in it. All problems are in one error.
    """
    problems = [_unmatched(rule, sizes) for rule in config.rules if not _matching(rule, sizes)]
    for rule in config.rules:
        if rule.precision == "fp8" and tied_head is not None and _matching(rule, sizes) == [tied_head]:
            problems.append(f"rule {rule.match!r} asks for FP8 in the head, which is tied to the embedding")
    if config.head == "fp8" and tied_head is not None:
        problems.append("precision.head=fp8 asks for FP8 in the head, which is tied to the embedding")
    if problems:
        raise PrecisionError(
            "; ".join(problems), "change precision.rules or precision.head; a tied head is always BF16"
        )

    linears = []
    for fqn, (out_features, in_features) in sizes.items():
        precision, reason = _decide(fqn, config, is_tied=fqn == tied_head)
        linears.append(LinearPlan(fqn, precision, reason, out_features, in_features))
    plan = PrecisionPlan(config.recipe, tuple(linears))
    if config.require_fp8 and not plan.fp8_linears:
        raise PrecisionError(
            "FP8 is required, but the plan runs nothing in FP8",
            "choose precision=infir2 or precision.require_fp8=false",
        )
    return plan


def nearest(name: str, candidates: Iterable[str]) -> str:
    """` (did you mean X?)` with the candidate that resembles `name` most, or nothing."""
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _decide(fqn: str, config: PrecisionConfig, *, is_tied: bool) -> tuple[Precision, str]:
    if is_tied:
        return "bf16", "tied to the embedding"
    for rule in reversed(config.rules):
        if fnmatchcase(fqn, rule.match):
            return rule.precision, rule.reason
    if fqn.rpartition(".")[2] == HEAD:
        return config.head, f"precision.head={config.head}"
    return config.default, f"precision.default={config.default}"


def _matching(rule: PrecisionRule, fqns: Iterable[str]) -> list[str]:
    return [fqn for fqn in fqns if fnmatchcase(fqn, rule.match)]


def _unmatched(rule: PrecisionRule, fqns: Iterable[str]) -> str:
    globs = [f"*.{fqn.rpartition('.')[2]}" for fqn in fqns] + [re.sub(r"\.(\d+)\..*", r".\1.*", fqn) for fqn in fqns]
    return f"rule {rule.match!r} matches no linear{nearest(rule.match, [*fqns, *dict.fromkeys(globs)])}"


def _ranges(fqns: list[str]) -> str:
    """Block numbers in the names, as in `0-3,7`."""
    numbers = [int(found[1]) for fqn in fqns if (found := re.search(r"\.(\d+)\.", fqn))]
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)

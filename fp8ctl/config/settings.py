"""What all settings have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of every group: unknown keys are refused, values can't change after composing."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

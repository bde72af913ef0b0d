"""The settings that measurements have; an experiment's notebook has those as parameters that a user may want to set."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rackbook.engine.forward import ITERS, SAMPLES
from rackbook.errors import ParameterError

K = 1024
CONTEXT_TOKENS = 128 * K
"""Context of most of the published steps."""


class Settings(BaseModel):
    """Settings of one experiment's measurement; subclasses add their own."""

    model_config = ConfigDict(extra="ignore", frozen=True, from_attributes=True)

    @field_validator("*")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        if isinstance(value, list) and len(set(value)) < len(value):
            raise ValueError("different values, each once")
        return value

    @classmethod
    def of(cls, given: Any) -> Self:
        """Take the settings out of the parameters of a notebook, a mapping, or settings; what is not there is default.

        Raises:
            ParameterError: a value that is not allowed.
        """
        try:
            return cls.model_validate(given if given is not None else {})
        except ValidationError as problem:
            first = problem.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"]) or "the combination of settings"
            raise ParameterError(
                f"{name}: got {first['input']!r}, allowed: {first['msg'].removeprefix('Value error, ')}"
            ) from None

    def on_lab(self, **instead: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What the CPU lab makes of the settings, which does not take all of them.

        Args:
            instead: its own values by name; None for a setting that it has no use for.

        Returns:
            All settings as they will have run, and a note for the plan that names those given otherwise, if any.
        """
        given = {name: getattr(self, name) for name in instead}
        words = [
            f"{name} is not used (given {given[name]})" if value is None else f"{name} is {value} (given {given[name]})"
            for name, value in instead.items()
            if given[name] not in (value, None)
        ]
        note = (f"on the lab {'; '.join(words)}",) if words else ()
        return self.model_dump(mode="json") | instead, note


class ForwardSettings(Settings):
    """Settings of ``vllm bench forward``."""

    measured_iters: int = Field(default=ITERS, ge=1, description="replays in a sample")
    measured_samples: int = Field(default=SAMPLES, ge=2, description="samples per batch; their spread is the quality")
    measured_step_tokens: int = Field(default=8192, ge=1, description="most tokens in a step, held fixed")

    @property
    def quality(self) -> dict[str, int]:
        """Arguments of :func:`rackbook.engine.forward.stage`."""
        return {"iters": self.measured_iters, "samples": self.measured_samples}

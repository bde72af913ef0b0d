"""Rules that the parameters of several notebooks keep."""

from __future__ import annotations

from typing import Annotated, Protocol, TypeVar

from pydantic import AfterValidator

from rackbook import catalog


class Speculative(Protocol):
    """Parameters with drafts: tokens that a step yields per request, and tokens drafted per request and step."""

    acceptance_length: float
    draft_tokens: int


S = TypeVar("S", bound=Speculative)


def _known(gpu: str) -> str:
    catalog.hardware(gpu)
    return gpu


Gpu = Annotated[str, AfterValidator(_known)]
"""Name of a GPU that ``data/hardware`` has."""


def ascending(sizes: list[int]) -> list[int]:
    """The sizes, if they are whole numbers from 1 in ascending order, each once.

    Raises:
        ValueError: they are not.
    """
    if sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"got {sizes}, allowed: whole numbers ≥ 1 in ascending order, each once")
    return sizes


def no_more_than_checked(params: S) -> S:
    """The parameters, if a step yields no more tokens than it checks: the drafts and the target's own.

    Raises:
        ValueError: it does.
    """
    if params.acceptance_length > 1 + params.draft_tokens:
        raise ValueError(
            f"acceptance_length: got {params.acceptance_length:g}, allowed: at most {1 + params.draft_tokens}, "
            "the drafted tokens and the target's own"
        )
    return params

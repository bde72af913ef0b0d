"""TOML files read into checked records; a complaint names file, field, what was got and what is allowed."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ValidationError

from rackbook.errors import DataError, one_of
from rackbook.locations import shown

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic_core import ErrorDetails

R = TypeVar("R", bound=BaseModel)

_SECRET = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTHORIZATION)(?=[_-]|$)", re.IGNORECASE
)


def names_a_secret(name: str) -> bool:
    """Whether a variable or an option looks like one that holds a secret: HF_TOKEN, but not MAX_TOKENS."""
    return _SECRET.search(name) is not None


def _without_secrets(variables: dict[str, str]) -> dict[str, str]:
    if found := sorted(filter(names_a_secret, variables)):
        raise ValueError(
            f"{', '.join(found)} would lie in the folder of every run and in the list of processes; allowed: variables "
            "without secrets. Set it in the environment of the process that runs rackbook instead"
        )
    return variables


Environment = Annotated[dict[str, str], AfterValidator(_without_secrets)]
"""Variables of a process that a file may name; none that looks like a secret."""


def load(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        DataError: no such file, a folder, or not TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(f"{shown(path)}: no such file") from None
    except OSError as problem:
        raise DataError(f"{shown(path)}: not a readable file: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise DataError(f"{shown(path)}: not valid TOML: {problem}") from None


def checked(content: object, kind: type[R], where: str) -> R:
    """Check what a file holds.

    Args:
        content: what was parsed.
        kind: the record that it must be.
        where: file and place in it, for the message.

    Raises:
        DataError: a field is missing, misspelt or has a value that is not allowed; names all such fields.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as problem:
        complaints = [_complaint(error, kind) for error in problem.errors()]
        raise DataError(f"{where}: {'; '.join(complaints)}") from None


def read(path: Path, kind: type[R]) -> R:
    """Read one TOML file as one record.

    Raises:
        DataError: as :func:`load` and :func:`checked` say.
    """
    return checked(load(path), kind, shown(path))


def _complaint(error: ErrorDetails, kind: type[BaseModel]) -> str:
    field = ".".join(str(part) for part in error["loc"])
    prefix = f"field {field}: " if field else ""
    if error["type"] == "missing":
        return f"{prefix}got nothing, it must be there"
    if error["type"] == "extra_forbidden":
        *parents, last = error["loc"]
        for part in parents:
            kind = _member(kind, part)
        return f"{prefix}{one_of(str(last), _keys(kind), 'key')}"
    got = sorted(error["input"]) if error["loc"][-1:] == ("environment",) and isinstance(error["input"], dict) else None
    return f"{prefix}got {got or error['input']!r}, {error['msg'][:1].lower()}{error['msg'][1:]}"


def _keys(kind: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def _member(kind: type[BaseModel], part: int | str) -> type[BaseModel]:
    """The record inside a record's field; the record itself for a number in a list or a key of a mapping."""
    if part not in _keys(kind):
        return kind
    annotation = _keys(kind)[part].annotation
    for inside in (annotation, *get_args(annotation)):
        if isinstance(inside, type) and issubclass(inside, BaseModel):
            return inside
    return kind

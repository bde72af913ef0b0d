"""The notebooks: which there are, what each asks, and the parameters it declares."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackbook.errors import DataError, ParameterError, one_of
from rackbook.locations import NOTEBOOKS, shown

_TITLE = re.compile(r"#\s+(?P<number>\d\d)\s+(?P<title>[^:\n]+)(?::\s*(?P<question>[^\n]+))?")
_NOTE = re.compile(r"#\s*\[(?P<unit>[^\]]+)\]\s*(?P<meaning>.+)")
_SCALARS = {"int": int, "float": float, "str": str, "bool": bool}


@dataclass(frozen=True)
class Kind:
    """The declared type of a parameter.

    Attributes:
        scalar: "int", "float", "str" or "bool"; of the elements in a list.
        is_list: a list of such values.
        optional: may also be None.
    """

    scalar: str
    is_list: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return (f"list[{self.scalar}]" if self.is_list else self.scalar) + (" | None" if self.optional else "")

    def holds(self, value: Any) -> bool:
        """Whether a Python value is of this type; an int counts as a float, a bool never as a number."""
        if value is None:
            return self.optional
        if self.is_list:
            return isinstance(value, list) and all(Kind(self.scalar).holds(item) for item in value)
        if isinstance(value, bool) or self.scalar == "bool":
            return isinstance(value, bool) and self.scalar == "bool"
        return isinstance(value, (int, float) if self.scalar == "float" else _SCALARS[self.scalar])


@dataclass(frozen=True)
class Parameter:
    """One line of the cell tagged ``parameters``.

    Attributes:
        name: as in the notebook.
        kind: declared type.
        default: the literal.
        unit: unit, "-" without one, "path" for a file or folder of the user.
        meaning: what it is, in words.
    """

    name: str
    kind: Kind
    default: Any
    unit: str
    meaning: str


@dataclass(frozen=True)
class Notebook:
    """One notebook as it lies in its folder.

    Attributes:
        name: file name without the ending, e.g. "06_expert_balance".
        topic: the experiment's name, e.g. "expert_balance".
        path: the file.
        title: short title.
        question: what it answers; empty if the title asks nothing.
        parameters: in the order of the cell.
    """

    name: str
    topic: str
    path: Path
    title: str
    question: str
    parameters: tuple[Parameter, ...]

    def parameter(self, name: str) -> Parameter:
        """Look a parameter up.

        Raises:
            ParameterError: the notebook does not declare it.
        """
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        raise ParameterError(one_of(name, [p.name for p in self.parameters], f"parameter of {self.name}"))


def discover(folder: Path = NOTEBOOKS) -> list[Notebook]:
    """All notebooks of a folder, by number.

    Raises:
        DataError: no notebook there, two of the same topic, or one that cannot be read.
    """
    found = [read(path) for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))]
    if not found:
        raise DataError(f"{shown(folder)}: no notebook here, expected files like 01_context_sweep.ipynb")
    seen: dict[str, str] = {}
    for notebook in found:
        if notebook.topic in seen:
            raise DataError(f"{shown(folder)}: {seen[notebook.topic]} and {notebook.name} have the same topic")
        seen[notebook.topic] = notebook.name
    return found


def select(names: list[str], notebooks: list[Notebook]) -> list[Notebook]:
    """The notebooks that are meant by their number, topic, name or file; all of them without a name.

    Args:
        names: e.g. "06", "expert_balance", "06_expert_balance", "notebooks/06_expert_balance.ipynb".
        notebooks: to choose from.

    Returns:
        The chosen ones in the order of ``notebooks``, each once.

    Raises:
        DataError: a name that means none of them.
    """
    if not names:
        return list(notebooks)
    aliases = {alias: n.name for n in notebooks for alias in (n.name, n.topic, n.name[:2])}
    wanted = set()
    for name in names:
        stem = Path(name).name.removesuffix(".ipynb")
        alias = stem.zfill(2) if stem.isdigit() else stem
        if alias not in aliases:
            close = one_of(stem, [n.name for n in notebooks], "notebook")
            if "Did you mean" not in close:  # compared with the topics, the number in front does not count
                topics = one_of(stem, [n.topic for n in notebooks], "notebook").partition(" Did you mean ")[2]
                close += f" Did you mean {topics}" if topics else ""
            raise DataError(close)
        wanted.add(aliases[alias])
    return [n for n in notebooks if n.name in wanted]


def read(path: Path) -> Notebook:
    """Read a notebook's title and parameters.

    Raises:
        DataError: not a notebook of this suite: broken JSON, no title, or a parameters cell that breaks the form.
    """
    content = load_json(path)
    cells = content.get("cells", [])
    title = next((m for c in cells if c.get("cell_type") == "markdown" and (m := _TITLE.match(source(c)))), None)
    if title is None:
        raise DataError(f"{shown(path)}: a markdown cell must start with '# NN Title: the question?'")
    tagged = [c for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise DataError(f"{shown(path)}: got {len(tagged)} cells tagged 'parameters', expected 1")
    return Notebook(
        name=path.stem,
        topic=path.stem.partition("_")[2],
        path=path,
        title=title["title"].strip(),
        question=(title["question"] or "").strip(),
        parameters=read_parameters(source(tagged[0]), shown(path)),
    )


def load_json(path: Path) -> dict[str, Any]:
    """The content of a notebook file.

    Raises:
        DataError: not a file, not JSON, or not a version 4 notebook.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(f"{shown(path)}: no such file") from None
    except (OSError, ValueError) as problem:
        raise DataError(f"{shown(path)}: not a notebook ({problem}); is it half written?") from None
    if not isinstance(content, dict) or content.get("nbformat") != 4 or not isinstance(content.get("cells"), list):
        raise DataError(f"{shown(path)}: not a notebook of format 4")
    return content


def source(cell: dict[str, Any]) -> str:
    """A cell's text; the file format allows a list of lines."""
    text = cell.get("source", "")
    return "".join(text) if isinstance(text, list) else text


def read_parameters(code: str, where: str) -> tuple[Parameter, ...]:
    """Read the declarations of a parameters cell.

    Args:
        code: lines ``name: type = literal  # [unit] meaning``.
        where: the notebook, for messages.

    Raises:
        DataError: a line of another form, an unknown type, a default of another type, no unit or meaning.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError as problem:
        raise DataError(f"{where}, parameters cell, line {problem.lineno}: {problem.msg}") from None
    notes = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT
    }
    found: list[Parameter] = []
    for statement in tree.body:
        at = f"{where}, parameters cell, line {statement.lineno}"
        declares = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value
        if not declares:
            raise DataError(f"{at}: got {ast.unparse(statement)!r}, allowed: name: type = literal  # [unit] meaning")
        name = statement.target.id
        kind = _kind(statement.annotation, f"{at}, {name}")
        try:
            default = ast.literal_eval(statement.value)
        except ValueError:
            got = ast.unparse(statement.value)
            raise DataError(f"{at}, {name}: got the default {got!r}, allowed: a literal") from None
        if not kind.holds(default):
            raise DataError(f"{at}, {name}: got the default {default!r}, declared: {kind}")
        note = _NOTE.match(notes.get(statement.end_lineno or 0, ""))
        if note is None:
            raise DataError(f"{at}, {name}: the line must end with '# [unit] meaning' ('[-]' without a unit)")
        if any(p.name == name for p in found):
            raise DataError(f"{at}: {name} stands twice")
        found.append(Parameter(name, kind, default, note["unit"].strip(), note["meaning"].strip()))
    return tuple(found)


def _kind(annotation: ast.expr, where: str) -> Kind:
    optional = False
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        if ast.unparse(annotation.right) == "None":
            annotation, optional = annotation.left, True
        elif ast.unparse(annotation.left) == "None":
            annotation, optional = annotation.right, True
    match annotation:
        case ast.Name(id=scalar) if scalar in _SCALARS:
            return Kind(scalar, optional=optional)
        case ast.Subscript(value=ast.Name(id="list"), slice=ast.Name(id=scalar)) if scalar in ("int", "float", "str"):
            return Kind(scalar, is_list=True, optional=optional)
    allowed = "int, float, str, bool, list[int], list[float], list[str], each also with | None"
    raise DataError(f"{where}: got the type {ast.unparse(annotation)!r}, allowed: {allowed}")

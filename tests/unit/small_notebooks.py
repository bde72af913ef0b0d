"""Small notebooks for the tests of the suite: they start a kernel and import nothing that takes time."""

from __future__ import annotations

import base64
import json
import struct
import sys
import types
import zlib
from importlib.machinery import ModuleSpec
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rackbook.startup import without_iri_grammar

with without_iri_grammar():
    import nbformat

PARAMETERS = """\
seed: int = 1  # [-] seed of the draws
rate: float = 0.5  # [req/s] arrival rate
label: str = "a"  # [-] a text
fast: bool = False  # [-] a switch
sizes: list[int] = [1, 2]  # [tokens] batch sizes
points_path: str = ""  # [path] a file of the user; empty for none
limit: float | None = None  # [ms] upper bound; none for no bound
"""


class Params(BaseModel):
    """The experiment's side of PARAMETERS."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(default=1, ge=0)
    rate: float = Field(default=0.5, gt=0, le=1)
    label: str = "a"
    fast: bool = False
    sizes: list[int] = [1, 2]
    points_path: str = ""
    limit: float | None = None


def png() -> str:
    """One white pixel, base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\x00\xff")) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode()


def spec(name: str = "dots", **more: object) -> dict:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "name": name,
        "title": {"text": "Dots", "subtitle": "two of them"},
        "data": {"values": [{"a": 1, "b": 2}, {"a": 2, "b": 3}]},
        "mark": "point",
        "encoding": {"x": {"field": "a", "type": "quantitative"}, "y": {"field": "b", "type": "quantitative"}},
        **more,
    }


def record(topic: str, **more: object) -> dict:
    return {
        "id": f"{topic}.one", "statement": "One is one.", "value": 1.0, "unit": "ms", "tolerance": 0.1,
        "kind": "printed", "source": "S1", "locator": "one", "found": 1.05, "difference": 0.05,
        "verdict": "consistent", "basis": "derived", "note": "", "topic": topic, "needs": None, "command": None, **more,
    }  # fmt: skip


def show_chart(chart: dict, *, picture: bool = True) -> str:
    data = {"application/vnd.vegalite.v5+json": chart, "text/plain": "<chart>"}
    if picture:
        data["image/png"] = png()
    return f"import json\nfrom IPython.display import display\ndisplay(json.loads({json.dumps(data)!r}), raw=True)"


def show_verdicts(*records: dict) -> str:
    data = {"application/vnd.rackbook.verdicts+json": list(records), "text/plain": "verdicts"}
    return f"import json\nfrom IPython.display import display\ndisplay(json.loads({json.dumps(data)!r}), raw=True)"


def notebook(folder: Path, name: str, *cells: str, parameters: str = PARAMETERS, verdicts: bool = True) -> Path:
    """Write a notebook; a cell that starts with "#md " is Markdown."""
    topic = name.partition("_")[2]
    title = f"# {name[:2]} {topic.replace('_', ' ').capitalize()}: does {topic} hold?\n\nIt says what it does."
    found = [nbformat.v4.new_markdown_cell(title), nbformat.v4.new_code_cell(parameters)]
    found[1].metadata["tags"] = ["parameters"]
    for text in (*cells, *([show_verdicts(record(topic))] if verdicts else [])):
        is_markdown = text.startswith("#md ")
        new = nbformat.v4.new_markdown_cell if is_markdown else nbformat.v4.new_code_cell
        found.append(new(text.removeprefix("#md ")))
    for number, cell in enumerate(found):
        cell["id"] = f"cell-{number}"
    content = nbformat.v4.new_notebook(cells=found)
    content.metadata["kernelspec"] = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    path = folder / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(content, path)
    return path


def register_experiment(monkeypatch, topic: str) -> None:
    """Make ``rackbook.experiments.<topic>`` exist in this process."""
    name = f"rackbook.experiments.{topic}"
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.Params = Params
    monkeypatch.setitem(sys.modules, name, module)

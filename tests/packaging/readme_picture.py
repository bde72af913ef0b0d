"""The picture of the README: the board's chart as notebook 00 shows it. ``python readme_picture.py`` writes it."""

import base64
from pathlib import Path

from rackbook.suite.artefacts import charts
from rackbook.suite.notebooks import load_json

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "README.png"


def picture() -> bytes:
    """The chart in the committed notebook, as PNG."""
    content = load_json(ROOT / "notebooks" / "00_overview.ipynb")
    (chart,) = [c for c in charts(content) if c.name == "verdicts_by_notebook"]
    return base64.b64decode(chart.png)


if __name__ == "__main__":
    PICTURE.write_bytes(picture())

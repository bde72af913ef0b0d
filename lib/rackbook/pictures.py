"""Pictures of Vega-Lite specifications, drawn by vl-convert and kept by what they show.

Drawing all charts of the suite takes longer than computing them, and on a second run they are the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.metadata import version
from typing import Any

from rackbook import cache

VEGALITE_MIME = "application/vnd.vegalite.v5+json"
"""Output type of a chart in a notebook; the version that JupyterLab draws."""

LATER = "RACKBOOK_PICTURES_LATER"
"""Environment variable: a kernel that has it leaves the pictures to whoever executes it. The converter takes a second
to start, which a batch pays once and not in each kernel."""

PNG_SCALE = 1.5

_KIND, _MOST = "pictures", 2000


def text(spec: dict[str, Any]) -> str:
    """A specification as text, the same for the same chart."""
    return json.dumps(spec, sort_keys=True, ensure_ascii=False)


def png(spec: dict[str, Any]) -> str:
    """Draw a chart as a PNG, in base64 as notebooks keep it.

    Raises:
        ValueError: the specification cannot be drawn.
    """

    def draw() -> bytes:
        import vl_convert

        return vl_convert.svg_to_png(svg(spec), scale=PNG_SCALE)

    whole = cache.kept(_KIND, _name(spec, f"x{PNG_SCALE}.png"), draw, lambda content: content.endswith(_PNG_END))
    return base64.b64encode(whole).decode()


def svg(spec: dict[str, Any]) -> str:
    """Draw a chart as SVG.

    Raises:
        ValueError: the specification cannot be drawn.
    """

    def draw() -> bytes:
        import vl_convert

        return vl_convert.vegalite_to_svg(text(spec)).encode()

    return cache.kept(_KIND, _name(spec, "svg"), draw, lambda content: content.rstrip().endswith(b"</svg>")).decode()


def prune() -> None:
    """Forget the pictures that were drawn longest ago."""
    cache.prune(_KIND, _MOST)


def _name(spec: dict[str, Any], kind: str) -> str:
    digest = hashlib.sha256(text(spec).encode()).hexdigest()
    return f"{digest}-{version('vl-convert-python')}.{kind}"


_PNG_END = b"IEND\xaeB`\x82"

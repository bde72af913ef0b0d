"""Pictures of Vega-Lite specifications, drawn by vl-convert."""

from __future__ import annotations

import base64
import json
from typing import Any

VEGALITE_MIME = "application/vnd.vegalite.v5+json"
"""Output type of a chart in a notebook; the version that JupyterLab draws."""

LATER = "RACKBOOK_PICTURES_LATER"
"""Environment variable: a kernel that has it leaves the pictures to whoever executes it. The converter takes a second
to start, which a batch pays once and not in each kernel."""

PNG_SCALE = 1.5


def text(spec: dict[str, Any]) -> str:
    """A specification as text, the same for the same chart."""
    return json.dumps(spec, sort_keys=True, ensure_ascii=False)


def png(spec: dict[str, Any]) -> str:
    """Draw a chart as a PNG, in base64 as notebooks keep it.

    Raises:
        ValueError: the specification cannot be drawn.
    """
    import vl_convert

    return base64.b64encode(vl_convert.vegalite_to_png(text(spec), scale=PNG_SCALE)).decode()


def svg(spec: dict[str, Any]) -> str:
    """Draw a chart as SVG.

    Raises:
        ValueError: the specification cannot be drawn.
    """
    import vl_convert

    return vl_convert.vegalite_to_svg(text(spec))

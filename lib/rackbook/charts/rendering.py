"""The notebook renderer: interactive where it can be, a picture everywhere, and comparable by nbval.

Each chart is put out as a Vega-Lite specification (JupyterLab draws it, also untrusted and offline), as a PNG
(for pages that show only pictures) and as a line of text with the specification's SHA-256.
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any

import altair as alt
import polars as pl

from rackbook import pictures
from rackbook.charts import theme

_DIGITS = 9  # the last bits of a float differ between processors; nine digits still show a change of 1e-9


def enable() -> None:
    """Switch the theme, the renderer and the look of tables on, for this kernel."""
    alt.theme.register("rackbook", enable=True)(theme.configuration)
    alt.renderers.register("rackbook", mimebundle)
    alt.renderers.enable("rackbook")
    pl.Config(
        tbl_rows=60, tbl_cols=20, fmt_str_lengths=200, tbl_width_chars=200,
        tbl_hide_column_data_types=True, tbl_hide_dataframe_shape=True,
        float_precision=None, fmt_float="mixed",
    )  # fmt: skip


def normalized(value: Any) -> Any:
    """Make a specification plain, finite JSON: non-finite numbers become null, floats keep nine digits."""
    if isinstance(value, dict):
        return {key: normalized(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [normalized(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def mimebundle(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    """The outputs of one chart, by MIME type; without the picture where the suite adds it later."""
    spec = normalized(spec)
    digest = hashlib.sha256(pictures.text(spec).encode()).hexdigest()
    bundle = {
        pictures.VEGALITE_MIME: spec,
        "text/plain": f"<chart {spec.get('name', 'without name')}, spec sha256 {digest}>",
    }
    if pictures.LATER not in os.environ:
        bundle["image/png"] = pictures.png(spec)
    return bundle

"""Vega, Vega-Lite and Vega-Embed as one script, from the converter's own copy."""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import version
from pathlib import Path

_LEAST_BYTES = 500_000


def bundle() -> str:
    """The script that defines ``vegaEmbed``, for a page without a network.

    Bundling takes three seconds, so the script is kept in the user's cache folder, by the converter's version.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = base / "rackbook" / f"vega-embed-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = kept.read_text("utf-8")
        if len(text) >= _LEAST_BYTES and "window.vegaEmbed" in text:
            return text
    import vl_convert

    text = vl_convert.javascript_bundle()
    with contextlib.suppress(OSError):  # a read-only home costs time, not the report
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{os.getpid()}.partial")
        partial.write_text(text, "utf-8")
        partial.replace(kept)
    return text

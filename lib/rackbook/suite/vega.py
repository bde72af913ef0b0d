"""Vega, Vega-Lite and Vega-Embed as one script, from the converter's own copy."""

from __future__ import annotations

from importlib.metadata import version

from rackbook import cache

_LEAST_BYTES = 500_000


def bundle() -> str:
    """The script that defines ``vegaEmbed``, for a page without a network.

    Bundling takes three seconds, so the script is kept, by the converter's version.
    """

    def make() -> bytes:
        import vl_convert

        return vl_convert.javascript_bundle().encode()

    name = f"vega-embed-{version('vl-convert-python')}.js"
    return cache.kept("vega", name, make, _is_whole).decode()


def _is_whole(script: bytes) -> bool:
    return len(script) >= _LEAST_BYTES and b"window.vegaEmbed" in script

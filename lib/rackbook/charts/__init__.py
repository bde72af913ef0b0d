"""Charts: one theme, one renderer, one module per family. A chart function takes a frame and returns a chart."""

from rackbook.startup import without_iri_grammar

with without_iri_grammar():
    from rackbook.charts.rendering import enable

__all__ = ["enable"]

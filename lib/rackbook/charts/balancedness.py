"""What charts of balancedness share: its column, the parts of the model that have one, and its axis."""

from __future__ import annotations

import altair as alt

from rackbook.charts import theme

PARTS = ("target", "draft")
VALUE = "balancedness_per_layer_step"


def cut_axis() -> alt.Y:
    """The y axis for values close to each other: it does not start at 0."""
    # the title is longer than the axis is high, so it lies above
    above = alt.Axis(titleAngle=0, titleAlign="left", titleX=-36, titleY=-12)
    return theme.y(VALUE, scale=alt.Scale(zero=False), axis=above)

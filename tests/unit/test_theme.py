"""What an axis says about itself in its title."""

import altair as alt
import pytest

from rackbook.charts import theme

CUT = ", axis does not start at 0"


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        ({}, ""),
        ({"domain": [0, 1]}, ""),
        ({"domain": [-1, 1]}, ""),
        ({"domainMin": 0, "domainMax": 80}, ""),
        ({"domain": [0.2, 1]}, CUT),
        ({"domain": [1, 0.2]}, CUT),
        ({"domain": [-2, -1]}, CUT),
        ({"domainMin": 0.2}, CUT),
        ({"zero": False}, CUT),
        ({"type": "log", "domain": [8, 256]}, ", log scale"),
    ],
)
def test_an_axis_that_is_cut_or_not_linear_says_so(scale, says):
    for axis in (theme.x, theme.y):
        assert axis("step_ms", scale=alt.Scale(**scale)).to_dict()["title"] == theme.title("step_ms") + says

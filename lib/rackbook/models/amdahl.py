"""What a whole gains when one part of it becomes faster (Amdahl's law).

The parts are taken one after the other: where they overlap in time, the whole gains less.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import ParameterError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def whole_speedup(part_share: float, part_speedup: ArrayLike) -> NDArray[np.float64]:
    """Speed-up of the whole: 1 ÷ (1 − share + share ÷ speed-up of the part).

    Args:
        part_share: the part's share of the time before, 0 to 1.
        part_speedup: how many times faster the part becomes, > 0.

    Raises:
        ParameterError: a share outside 0 to 1, or a speed-up that is not positive.
    """
    faster = np.asarray(part_speedup, dtype=float)
    if not 0 <= part_share <= 1 or not (faster > 0).all():
        raise ParameterError(f"got a share of {part_share:g} and a speed-up of {part_speedup}, allowed: 0 to 1 and > 0")
    return 1 / (1 - part_share + part_share / faster)


def greatest_speedup(part_share: float) -> float:
    """Speed-up of the whole if the part took no time at all: 1 ÷ (1 − share); infinite for the whole itself."""
    return 1 / (1 - part_share) if part_share < 1 else math.inf

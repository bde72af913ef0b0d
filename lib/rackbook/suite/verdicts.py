"""How verdicts are put before a person: in which order, with which mark, and what each word means."""

ORDER = ("refuted", "inconsistent", "open", "reproduced", "consistent")
"""What contradicts a source comes first."""

MARKS = {"refuted": "✗", "inconsistent": "≠", "open": "?", "reproduced": "✓", "consistent": "≈"}

MEANINGS = {
    "refuted": "measured under the claim's conditions, and off",
    "inconsistent": "computed again from other published numbers, or simulated, and off",
    "open": "needs hardware or data that is missing here",
    "reproduced": "measured or simulated here, within tolerance",
    "consistent": "computed again from other published numbers, within tolerance",
}

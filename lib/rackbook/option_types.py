"""Values of options on the command line, for ``type=`` of argparse; imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path


def folder(text: str) -> Path:
    """A folder to write to.

    Raises:
        ArgumentTypeError: an address.
    """
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"got the address {text}, allowed: a folder, because results need locks and renames"
        )
    return Path(text)


def whole_from_one(text: str) -> int:
    """A whole number from 1.

    Raises:
        ArgumentTypeError: something else.
    """
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a whole number from 1")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0.

    Raises:
        ArgumentTypeError: something else.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a number above 0")
    return value


def names(text: str) -> list[str]:
    """Names with commas between, each once; none for an empty text.

    Raises:
        ArgumentTypeError: one stands twice.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if repeated := next((name for name in found if found.count(name) > 1), None):
        raise argparse.ArgumentTypeError(f"got {text!r}, in which {repeated} stands twice")
    return found

"""The one base class of every error that a person is meant to read."""


class RackbookError(Exception):
    """A problem in the user's input, data or environment; the message says what, where and what is allowed."""


class DataError(RackbookError, ValueError):
    """A data file or frame that breaks its schema."""


class ParameterError(RackbookError, ValueError):
    """A notebook parameter that does not exist or has a value that is not allowed."""


def one_of(got: str, allowed: object, what: str) -> str:
    """Word the complaint about a name that is not in a list, with the closest match first.

    Args:
        got: the name that was given.
        allowed: iterable of valid names.
        what: what the name is, e.g. "table" or "parameter of 01_context_sweep".
    """
    from difflib import get_close_matches

    names = sorted(allowed)
    close = get_close_matches(got, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {what}: got {got!r}, allowed: {', '.join(names) or '(none)'}.{hint}"

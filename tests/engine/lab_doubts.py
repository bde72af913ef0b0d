"""What a run on the lab may be doubted for, apart from the machine being busy."""


def without_load(flags):
    """Doubts other than those that a busy machine gives."""
    of_load = ("other programs", "limit ±", "client used", "spread is not known")
    return [flag for flag in flags if not any(words in flag for words in of_load)]

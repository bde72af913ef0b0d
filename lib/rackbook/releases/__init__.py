"""Which release of a package holds which change, found by looking inside the wheels.

``probes`` reads a list of pull requests and judges contents by it, ``contents`` opens wheels and folders, ``ranges``
and ``index`` read a wheel on the package index without downloading all of it, ``targets`` finds what a person names,
``release_map`` keeps the result, and ``commands`` is the command line.
"""

from rackbook.locations import DATA

PRS = DATA / "releases" / "prs.toml"
"""The list of pull requests that comes with rackbook."""
MAP = DATA / "releases" / "release_map.json"
"""The map of that list, as ``rackbook releases update`` writes it."""

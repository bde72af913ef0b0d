"""Copies of executed notebooks in another place: a folder on another disk, or an address that papermill can write.

The results themselves lie in a folder, because locks and renames need one.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rackbook.errors import ParameterError
from rackbook.startup import without_iri_grammar
from rackbook.suite.store import NOTEBOOK, Store


def send(complete: Mapping[str, Path], results: Store, to: str) -> Iterator[str]:
    """Copy what has not been copied there yet, as ``<to>/<notebook>/<execution>.ipynb``.

    Args:
        complete: folders of complete executions by request.
        results: the folder they are in; it keeps what has been copied where.
        to: a folder, or an address such as ``s3://bucket/folder``; the query of an address stays at its end.

    Yields:
        Why a notebook could not be copied; the next call tries it again.

    Raises:
        ParameterError: papermill cannot write such an address.
    """
    place, mark, query = to.partition("?") if "://" in to else (to, "", "")
    place = place.rstrip("/")
    write = _writer(place)
    # the query of an Azure address is a key that is renewed; of the address, secrets and all, only a hash is kept
    same = place if place.startswith("abs://") else place + mark + query
    done = results.out / "copied" / hashlib.sha256(same.encode()).hexdigest()[:16]
    done.mkdir(parents=True, exist_ok=True)
    for folder in complete.values():
        copied = done / folder.name
        if copied.exists():
            continue
        text = (folder / NOTEBOOK).read_text("utf-8")
        try:
            write(text, f"{place}/{_name(text)}/{folder.name}.ipynb{mark}{query}")
        except Exception as problem:  # of any cloud's client
            why = str(problem).replace(query, "…") if query else str(problem)
            yield f"{folder.name}: not copied to {place}: {type(problem).__name__}: {why}"
            continue
        copied.touch()


def _name(text: str) -> str:
    return json.loads(text)["metadata"]["rackbook"]["notebook"]


def _writer(address: str) -> Callable[[str, str], object]:
    if "://" not in address:
        return _write_file
    with without_iri_grammar():
        from papermill.iorw import LocalHandler, papermill_io
    if isinstance(papermill_io.get_handler(address), LocalHandler):  # what it knows no better for
        known = sorted({scheme for scheme, _ in papermill_io._handlers if scheme.endswith("://")})
        raise ParameterError(f"--copy-to: got {address!r}, allowed: a folder, or an address with {', '.join(known)}")
    return papermill_io.write


def _write_file(text: str, address: str) -> None:
    path = Path(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)

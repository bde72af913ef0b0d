"""What a worker process is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """One notebook to execute.

    Attributes:
        notebook: its name.
        path: the file, left as it is.
        values: parameters to inject; the others keep their defaults.
        parameters: all parameters with their values.
        executed: where the executed notebook goes.
        charts: folder for its charts; None to write none.
        scratch: private folder, its path short.
        timeout_s: longest time for all cells together.
        run: id of the batch.
        work: working folder of the kernel; that of the notebook if None.
        environment: variables of the kernel beside those of this process.
        trace: file for the names of the library and data files that the notebook reads; None to keep none.
        memory_bytes: most memory of the kernel and what it starts; None for no limit.
        id: tells tasks of the same notebook apart.
    """

    notebook: str
    path: Path
    values: dict[str, Any]
    parameters: dict[str, Any]
    executed: Path
    charts: Path | None
    scratch: Path
    timeout_s: float
    run: str
    work: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    trace: Path | None = None
    memory_bytes: int | None = None
    id: str = ""

"""Record which experts the router chose, token by token, of a running server.

vLLM's own switch for this needs a model runner that its CPU build cannot use.

A file ``<rank>.<pid>.routed`` for each engine: a line of JSON with ``num_layers``, ``top_k``, ``num_experts`` and
``dtype``, then one record for each layer and step: layer (int32), number of tokens (int32), and the logical ids of the
experts (int16, tokens x top_k), all little-endian. Layers count from 0 over the layers that have experts.
Only tokens that requests brought are recorded: no warm-up, no idle rank's empty step.
"""

from __future__ import annotations

import json
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any

from rackbook_lab_plugin import ROUTED_EXPERTS_DIR


class Recorder:
    """Appends records to one file; a record is written whole or not at all.

    Attributes:
        num_tokens: tokens of the step that runs; 0 while none of a request's runs.
    """

    def __init__(self, path: Path, *, num_layers: int, top_k: int, num_experts: int) -> None:
        self.num_tokens = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        header = {"num_layers": num_layers, "top_k": top_k, "num_experts": num_experts, "dtype": "int16"}
        os.write(self._file, json.dumps(header).encode() + b"\n")

    def record(self, layer: int, topk_ids: Any) -> None:
        """Append what one layer's router chose, for the step's own tokens.

        Args:
            layer: counted from 0.
            topk_ids: tensor of logical expert ids, tokens x top_k, at least ``num_tokens`` rows.
        """
        if not self.num_tokens:
            return
        if topk_ids.shape[0] < self.num_tokens:
            raise RuntimeError(f"the router of layer {layer} saw {topk_ids.shape[0]} of {self.num_tokens} tokens")
        ids = topk_ids[: self.num_tokens].short().contiguous().numpy()
        os.write(self._file, struct.pack("<ii", layer, self.num_tokens) + ids.astype("<i2").tobytes())


def install() -> None:
    """Make vLLM's CPU model runner record, once it has its model."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if getattr(CPUModelRunner, "_rackbook_records", False):
        return
    load, execute = CPUModelRunner.load_model, CPUModelRunner.execute_model

    def load_model(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        self._rackbook_recorder = _attach(self)

    def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        self._rackbook_recorder.num_tokens = scheduler_output.total_num_scheduled_tokens
        try:
            return execute(self, scheduler_output, *arguments, **options)
        finally:
            self._rackbook_recorder.num_tokens = 0

    CPUModelRunner.load_model, CPUModelRunner.execute_model = load_model, execute_model
    CPUModelRunner._rackbook_records = True


def _attach(runner: Any) -> Recorder:
    from vllm.config import CompilationMode
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    if runner.vllm_config.compilation_config.mode != CompilationMode.NONE:
        raise RuntimeError(f"{ROUTED_EXPERTS_DIR}: compiled routers cannot be recorded, add --enforce-eager")
    runners = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
    if not runners:
        raise RuntimeError(f"{ROUTED_EXPERTS_DIR}: the model has no layer with experts")
    parallel = runner.vllm_config.parallel_config
    routers = [module.router for module in runners]
    recorder = Recorder(
        Path(os.environ[ROUTED_EXPERTS_DIR]) / f"{parallel.data_parallel_rank}.{os.getpid()}.routed",
        num_layers=len(routers),
        top_k=routers[0].top_k,
        num_experts=routers[0].global_num_experts,
    )
    for layer, router in enumerate(routers):
        router.set_capture_fn(partial(recorder.record, layer))
    return recorder

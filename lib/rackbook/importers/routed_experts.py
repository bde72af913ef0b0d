"""The experts that a running server's router chose, token by token: the lab's record of them, and the API's answers."""

from __future__ import annotations

import base64
import binascii
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rackbook.errors import DataError
from rackbook.experts.loads import Loads, checked
from rackbook.locations import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

SUFFIX = ".routed"
ANSWERS = (".jsonl", ".ndjson")


@dataclass(frozen=True, eq=False)
class Recorded:
    """What one engine's router chose.

    Attributes:
        rank: data-parallel rank of the engine.
        num_layers: layers with experts.
        num_experts: experts of a layer.
        top_k: experts per token.
        steps: ids of each step, shape (layers, tokens, top_k).
        unfinished: whether the last step was cut off, because the server still wrote or was killed; it is left out.
    """

    rank: int
    num_layers: int
    num_experts: int
    top_k: int
    steps: tuple[NDArray[np.int16], ...]
    unfinished: bool

    def loads(self, where: str) -> Loads:
        """Tokens per expert of each step.

        Raises:
            DataError: an id that is no expert, or a token that went to one expert twice.
        """
        counts = np.stack(
            [_counted(ids, self.num_experts, f"{where}, step {n}") for n, ids in enumerate(self.steps, 1)]
        )
        return checked(counts, top_k=self.top_k, where=where, num_experts=self.num_experts)


def read_folder(folder: Path) -> Loads:
    """Loads of all engines that recorded into a folder, summed step by step.

    Args:
        folder: holds ``<rank>.<pid>.routed`` files of one server.

    Raises:
        DataError: no such file, engines of different models or that ran different numbers of steps (an idle engine
            records none, so their steps cannot be matched), or what :meth:`Recorded.loads` refuses.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise DataError(f"{shown(folder)}: no {SUFFIX} file, expected one per engine of a server that records")
    recorded = [read_file(path) for path in paths]
    loads = [each.loads(shown(path)) for each, path in zip(recorded, paths, strict=True)]
    if len({(each.num_layers, each.num_experts, each.top_k) for each in recorded}) > 1:
        raise DataError(f"{shown(folder)}: the files are of different models")
    if len({len(each.steps) for each in recorded}) > 1:
        numbers = ", ".join(f"{len(each.steps)} (rank {each.rank})" for each in recorded)
        raise DataError(
            f"{shown(folder)}: the engines recorded {numbers} steps, which cannot be matched, as an idle engine "
            "records none; read one engine's file"
        )
    tokens = np.sum([each.tokens for each in loads], axis=0)
    return checked(tokens, top_k=recorded[0].top_k, where=shown(folder), num_experts=recorded[0].num_experts)


def read_file(path: Path) -> Recorded:
    """One engine's file: a line of JSON, then for each layer and step the layer, the tokens, and the experts' ids.

    Layers follow each other in order; a layer that is not above the last one begins a step.

    Raises:
        DataError: no such file, another form, or layers that are out of order.
    """
    where = shown(path)
    if not path.is_file():
        raise DataError(f"{where}: no such file")
    content = path.read_bytes()
    line, newline, body = content.partition(b"\n")
    sizes = _header(line, newline, where)
    num_layers, top_k = sizes["num_layers"], sizes["top_k"]
    steps: list[NDArray[np.int16]] = []
    layers: list[NDArray[np.int16]] = []
    at, cut_off = 0, False
    while at < len(body):
        if at + 8 > len(body):
            cut_off = True
            break
        layer, tokens = np.frombuffer(body, "<i4", 2, at).tolist()
        if layer != len(layers) or layer >= num_layers:
            raise DataError(f"{where}, byte {len(line) + 1 + at}: got layer {layer}, expected layer {len(layers)}")
        if tokens < 1 or (layers and tokens != len(layers[0])):
            expected = f"the {len(layers[0])} of layer 0" if layers else "1 or more"
            raise DataError(f"{where}, step {len(steps) + 1}, layer {layer}: got {tokens} tokens, expected {expected}")
        size = tokens * top_k
        if at + 8 + 2 * size > len(body):
            cut_off = True
            break
        layers.append(np.frombuffer(body, "<i2", size, at + 8).reshape(tokens, top_k))
        at += 8 + 2 * size
        if len(layers) == num_layers:
            steps.append(np.stack(layers))
            layers = []
    if not steps:
        raise DataError(f"{where}: no step is complete, expected {num_layers} layers of at least one")
    try:
        rank = int(path.name.split(".")[0])
    except ValueError:
        raise DataError(f"{where}: the name does not begin with the rank, expected <rank>.<pid>{SUFFIX}") from None
    return Recorded(rank, num_layers, sizes["num_experts"], top_k, tuple(steps), cut_off or bool(layers))


def decode(text: str, where: str = "routed_experts") -> NDArray[np.integer]:
    """The ``routed_experts`` of one choice of an answer.

    The server sends a NPY array in base64 when it runs with ``--enable-return-routed-experts``. The token sampled last
    has not been through the model and has no row.

    Source: vLLM 0.33.0, ``entrypoints/openai/chat_completion/protocol.py``.

    Returns:
        Expert ids, shape (tokens, layers, top_k): the prompt's tokens, then the generated ones but for the last.

    Raises:
        DataError: neither base64 nor such an array.
    """
    try:
        array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as problem:
        raise DataError(f"{where}: no NPY array in base64 ({problem})") from None
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise DataError(
            f"{where}: got {array.dtype} of shape {array.shape}, expected whole numbers (tokens, layers, top_k)"
        )
    return array


def read_answers(
    answers: Iterable[dict[str, Any]], *, num_experts: int, where: str, layers: Sequence[int] | None = None
) -> Loads:
    """Loads of decode steps, from the answers of requests that ran together.

    The n-th generated token of every request is taken as one step, as if all were decoded in the same steps from their
    first token on; answers say nothing of when a token was computed. Steps count as long as every request still
    generates. Prompts are left out.

    Args:
        answers: whole completion or chat answers, with ``choices`` and ``usage``.
        num_experts: experts of a layer; logical ids, so that redundant copies do not show.
        where: what they come from.
        layers: layers to take; None for all. A dense layer has no experts and reads as expert 0 throughout.

    Raises:
        DataError: an answer without ``routed_experts`` or ``usage``, answers of different models, no generated token
            that all have, or ids that are no experts.
    """
    decoded = []
    for number, answer in enumerate(answers, start=1):
        at = f"{where}, answer {number}"
        try:
            prompt, choices = answer["usage"]["prompt_tokens"], answer["choices"]
            texts = [choice.get("routed_experts") for choice in choices]
        except (KeyError, TypeError) as problem:
            raise DataError(f"{at}: got no {problem}, expected a whole completion answer with usage") from None
        for text in texts:
            if not text:
                raise DataError(
                    f"{at}: no routed_experts; start the server with --enable-return-routed-experts and the V2 model "
                    "runner, and do not abort requests"
                )
            ids = decode(text, at)
            if len(ids) < prompt:
                raise DataError(f"{at}: routed_experts has {len(ids)} tokens, the prompt alone {prompt}")
            decoded.append(ids[prompt:] if layers is None else ids[prompt:, list(layers)])
    if len({ids.shape[1:] for ids in decoded}) != 1:
        shapes = sorted({ids.shape[1:] for ids in decoded})
        raise DataError(f"{where}: answers with (layers, top_k) of {shapes or 'nothing'}, expected one model's")
    num_steps = min(len(ids) for ids in decoded)
    if not num_steps:
        raise DataError(f"{where}: an answer has no generated token with experts; ask for 2 tokens or more")
    together = np.stack([ids[:num_steps] for ids in decoded])
    counts = np.stack(
        [
            _counted(together[:, step].swapaxes(0, 1), num_experts, f"{where}, step {step + 1}")
            for step in range(num_steps)
        ]
    )
    return checked(
        counts, top_k=together.shape[3], where=where, num_experts=num_experts, layers=layers or range(counts.shape[1])
    )


def read_answers_file(path: Path, *, num_experts: int, layers: Sequence[int] | None = None) -> Loads:
    """:func:`read_answers` from a file with one answer per line, as JSON.

    Raises:
        DataError: no such file, a line that is no JSON object, or as :func:`read_answers`.
    """
    where = shown(path)
    if not path.is_file():
        raise DataError(f"{where}: no such file, expected one answer per line")
    answers = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):  # JSON may hold U+2028
        if not line.strip():
            continue
        try:
            answers.append(json.loads(line))
        except json.JSONDecodeError as problem:
            raise DataError(f"{where}, line {number}: no JSON ({problem.msg})") from None
    return read_answers(answers, num_experts=num_experts, where=where, layers=layers)


def _header(line: bytes, newline: bytes, where: str) -> dict[str, int]:
    try:
        found = json.loads(line)
        sizes = {name: int(found[name]) for name in ("num_layers", "top_k", "num_experts")}
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{where}: the first line is no header with num_layers, top_k and num_experts") from None
    if not newline or found.get("dtype") != "int16":
        raise DataError(f"{where}: got ids of {found.get('dtype')!r}, expected 'int16', and a line's end after it")
    if min(sizes.values()) < 1 or sizes["top_k"] > sizes["num_experts"]:
        raise DataError(f"{where}: a header of no model: {sizes}")
    return sizes


def _counted(ids: NDArray[np.integer], num_experts: int, where: str) -> NDArray[np.int64]:
    """Tokens per expert, shape (layers, experts), of ids of shape (layers, tokens, top_k)."""
    if ids.min() < 0 or ids.max() >= num_experts:
        got = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise DataError(f"{where}: got expert {got}, allowed: 0 to {num_experts - 1}")
    in_order = np.sort(ids, axis=2)
    twice = (in_order[:, :, 1:] == in_order[:, :, :-1]).any(axis=2)
    if twice.any():
        layer, token = np.argwhere(twice)[0]
        raise DataError(
            f"{where}: layer {layer} sends token {token} to one expert twice ({ids[layer, token].tolist()}); a dense "
            "layer reads so, leave it out"
        )
    keys = ids.astype(np.int64) + np.arange(len(ids))[:, None, None] * num_experts
    return np.bincount(keys.ravel(), minlength=len(ids) * num_experts).reshape(len(ids), num_experts)

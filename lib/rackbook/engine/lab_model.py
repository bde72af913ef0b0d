"""The models of the CPU lab: small mixtures of experts with random weights, written here, downloaded from nowhere.

The weights lie in a file, and are not vLLM's dummy ones: those are drawn anew for each shard, so that two ways to
shard a model would serve two different models, and nothing could be said about the collectives between them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rackbook.errors import ParameterError, one_of

SPECIAL_TOKENS = ("<unk>", "<bos>", "<eos>")
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
_ALIGNMENT = 32  # what the CPU build's expert kernel divides its matrices into
_HEAD_DIM = 64
_HEADS_PER_KV_HEAD = 2


class Shape(BaseModel):
    """What a lab model looks like; the defaults start in seconds and are dominated by overhead, not by arithmetic.

    Every layer is grouped-query attention and a mixture of experts, as in the Qwen3-MoE family.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden: int = Field(default=128, ge=64, description="width of a token's state, a multiple of 64")
    layers: int = Field(default=2, ge=1, description="number of layers")
    experts: int = Field(default=8, ge=2, description="experts of a layer")
    top_k: int = Field(default=2, ge=1, description="experts that a token visits in a layer")
    expert_width: int = Field(default=128, ge=32, description="inner width of an expert, a multiple of 64")
    vocabulary: int = Field(default=1024, ge=16, description="number of tokens, the three special ones included")
    context_tokens: int = Field(default=16384, ge=128, description="longest sequence")
    seed: int = Field(default=0, ge=0, description="of the weights")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="of the weights and the arithmetic")

    @model_validator(mode="after")
    def _fits(self) -> Shape:
        for name in ("hidden", "expert_width"):
            value, step = getattr(self, name), 2 * _ALIGNMENT
            if value % step:
                raise ValueError(f"{name}: got {value}, allowed: a multiple of {step}, so that two ranks can share it")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: got {self.top_k}, allowed: at most the {self.experts} experts of a layer")
        return self

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model."""
        return sum(math.prod(shape) for _, shape, _ in _tensors(self))


COMPUTE_DOMINATED = {
    "hidden": 512, "layers": 6, "experts": 16, "top_k": 2, "expert_width": 512, "dtype": "float32",
}  # fmt: skip
"""Shape of a model whose prefill is dominated by arithmetic: its step time grows with the tokens of the step.

In float32, since not every processor computes in bfloat16: one with AVX2 alone took 2.3 times as long.
"""


def name(**shape: object) -> str:
    """A folder name that says the whole shape, e.g. to keep models beside each other."""
    return f"moe-{hashlib.sha256(_shape(shape).model_dump_json().encode()).hexdigest()[:12]}"


def write(folder: Path, **shape: object) -> Path:
    """Write a model: ``config.json``, a tokenizer, and random weights.

    Token ``i`` from 3 on is the word ``t<i>``, and words are separated by blanks: a text has as many tokens as words,
    and decoding and encoding again gives the same tokens, so a client can ask for exact lengths.
    The same shape gives the same bytes on every machine.

    Args:
        folder: where; made if it is missing. A complete model of this very shape is left as it is.
        shape: fields of :class:`Shape`.

    Returns:
        The folder.

    Raises:
        ParameterError: a shape that cannot be served.
    """
    wanted = _shape(shape)
    folder = Path(folder)
    stamp = folder / "shape.json"  # written last
    text = wanted.model_dump_json(indent=1) + "\n"
    if stamp.is_file() and stamp.read_text("utf-8") == text:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    for name, content in (
        ("config.json", _config(wanted)),
        ("tokenizer.json", _tokenizer(wanted)),
        ("tokenizer_config.json", _tokenizer_config(wanted)),
        ("generation_config.json", {"bos_token_id": 1, "eos_token_id": 2}),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    _write_weights(folder / "model.safetensors", wanted)
    stamp.write_text(text, "utf-8")
    return folder


def _shape(fields: dict[str, object]) -> Shape:
    unknown = sorted(set(fields) - set(Shape.model_fields))
    if unknown:
        raise ParameterError(one_of(unknown[0], Shape.model_fields, "field of the lab model's shape"))
    try:
        return Shape.model_validate(fields)
    except ValidationError as problem:
        complaints = "; ".join(
            f"{'.'.join(map(str, error['loc']))} {error['msg']}".strip() for error in problem.errors()
        )
        raise ParameterError(f"the lab model's shape: {complaints}") from problem


def _heads(shape: Shape) -> tuple[int, int]:
    """Query heads and key/value heads."""
    heads = shape.hidden // _HEAD_DIM
    return heads, max(1, heads // _HEADS_PER_KV_HEAD)


def _config(shape: Shape) -> dict[str, object]:
    heads, kv_heads = _heads(shape)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": shape.dtype,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _HEAD_DIM,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": shape.context_tokens,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tokenizer(shape: Shape) -> dict[str, object]:
    words = [*SPECIAL_TOKENS, *(f"t{number}" for number in range(len(SPECIAL_TOKENS), shape.vocabulary))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": word, **flags} for number, word in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    unknown, begin, end = SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "bos_token": begin,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context_tokens,
        "chat_template": _CHAT_TEMPLATE,
    }


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Name, shape and standard deviation of every tensor, in file order; a deviation of 0 means all ones.

    Deviations of one over the square root of the inputs keep a token's state at unit size through the layers, so
    that attention, router and experts all matter to what comes out.
    """
    hidden, width = shape.hidden, shape.expert_width
    heads, kv_heads = _heads(shape)
    inner = heads * _HEAD_DIM
    yield "model.embed_tokens.weight", (shape.vocabulary, hidden), 1.0
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,), 0.0
        yield f"{at}.self_attn.q_proj.weight", (inner, hidden), hidden**-0.5
        yield f"{at}.self_attn.k_proj.weight", (kv_heads * _HEAD_DIM, hidden), hidden**-0.5
        yield f"{at}.self_attn.v_proj.weight", (kv_heads * _HEAD_DIM, hidden), hidden**-0.5
        yield f"{at}.self_attn.q_norm.weight", (_HEAD_DIM,), 0.0
        yield f"{at}.self_attn.k_norm.weight", (_HEAD_DIM,), 0.0
        yield f"{at}.self_attn.o_proj.weight", (hidden, inner), inner**-0.5
        yield f"{at}.post_attention_layernorm.weight", (hidden,), 0.0
        yield f"{at}.mlp.gate.weight", (shape.experts, hidden), hidden**-0.5
        for expert in range(shape.experts):
            yield f"{at}.mlp.experts.{expert}.gate_proj.weight", (width, hidden), hidden**-0.5
            yield f"{at}.mlp.experts.{expert}.up_proj.weight", (width, hidden), hidden**-0.5
            yield f"{at}.mlp.experts.{expert}.down_proj.weight", (hidden, width), 2 * width**-0.5
    yield "model.norm.weight", (hidden,), 0.0
    yield "lm_head.weight", (shape.vocabulary, hidden), 3 * hidden**-0.5


def _write_weights(path: Path, shape: Shape) -> None:
    """Write the safetensors format: length of the header in 8 bytes, the header in JSON, then the tensors."""
    generator = np.random.default_rng(shape.seed)
    itemsize, name_in_file = (2, "BF16") if shape.dtype == "bfloat16" else (4, "F32")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size, _ in _tensors(shape):
        start, end = end, end + math.prod(size) * itemsize
        header[name] = {"dtype": name_in_file, "shape": list(size), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for _, size, deviation in _tensors(shape):
            values = generator.standard_normal(size, dtype=np.float32) * np.float32(deviation) if deviation else None
            values = np.ones(size, dtype=np.float32) if values is None else values
            file.write((_bfloat16(values) if itemsize == 2 else values).tobytes())
    partial.replace(path)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of finite float32 values, rounded to nearest even, as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

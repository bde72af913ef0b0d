"""Models, hardware and prices: ``data/{models,hardware,prices}/*.toml``, every number with its origin."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rackbook import published, records
from rackbook.errors import DataError, one_of
from rackbook.locations import DATA

T = TypeVar("T")
Numbers = Annotated[tuple[int, ...], Field(strict=False)]
Spans = Annotated[tuple[Annotated[tuple[int, int], Field(strict=False)], ...], Field(strict=False)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Print(_Entry, Generic[T]):
    """One number as one source prints it.

    Attributes:
        value: the number.
        source: id of a registered source.
        locator: words by which the value is found in a report, or the section of an outside source.
    """

    value: T
    source: str
    locator: str


class Fact(_Entry, Generic[T]):
    """One number, or one short list of numbers, of one source.

    Attributes:
        value: the number; None where no source at hand gives it.
        unit: of the value.
        source: id of a registered source; None while the value is missing.
        locator: words by which the value is found in a report, or the section of an outside source.
        also: the same number as other sources print it; theirs may differ.
        note: what qualifies the value.
        missing_reason: why the value is missing.
    """

    value: T | None = None
    unit: str
    source: str | None = None
    locator: str | None = None
    also: Annotated[tuple[Print[T], ...], Field(strict=False)] = ()
    note: str = ""
    missing_reason: str = ""

    @model_validator(mode="after")
    def _has_origin_or_reason(self) -> Fact[T]:
        if self.value is None:
            if not self.missing_reason or self.source or self.locator or self.also:
                raise ValueError("a missing value needs a missing_reason, and neither source nor locator")
            return self
        if self.missing_reason:
            raise ValueError("a value that is there has no missing_reason")
        if not self.source or not self.locator:
            raise ValueError("a value needs source and locator")
        for key in (keys := [self.source, *(other.source for other in self.also)]):
            published.source(key)
        if len(set(keys)) < len(keys):
            raise ValueError(f"each source prints a value once, got {', '.join(keys)}")
        return self

    @property
    def known(self) -> T:
        """The value, for arithmetic that cannot go on without it.

        Raises:
            DataError: the value is missing; says why.
        """
        if self.value is None:
            raise DataError(f"a value in {self.unit} is missing: {self.missing_reason}")
        return self.value

    def elsewhere(self, source: str) -> Print[T] | None:
        """The first print of this number in a source other than the given one; None where there is none."""
        if self.value is None:
            return None
        own = Print(value=self.value, source=self.source, locator=self.locator)
        return next((one for one in (own, *self.also) if one.source != source), None)


class Attention(_Entry):
    """How the model attends, and what it keeps of each token.

    Attributes:
        kv_bytes_per_token: footprint of the global KV cache.
        sliding_window_tokens: window of every layer.
        full_index_layers: layers that index the full context.
        full_index_compression: by which factor those layers compress it.
        kv_compressing_layers: layers that compress their own KV.
        replay_boundary_layer: the layer that keeps the KV of all tokens but attends for the last ones only.
        replay_layers: first and last layer that process the replayed tokens only.
        replay_tokens: how many tokens a bounded replay processes.
        indexer_latents_per_query: latents that the indexer keeps.
        indexer_blocks: blocks that its pre-filter keeps.
        indexer_block_size: latents in such a block.
    """

    kv_bytes_per_token: Fact[float]
    sliding_window_tokens: Fact[int]
    full_index_layers: Fact[Numbers]
    full_index_compression: Fact[float]
    kv_compressing_layers: Fact[Numbers]
    replay_boundary_layer: Fact[int]
    replay_layers: Fact[Numbers]
    replay_tokens: Fact[int]
    indexer_latents_per_query: Fact[int]
    indexer_blocks: Fact[int]
    indexer_block_size: Fact[int]


class Experts(_Entry):
    """The experts of one MoE layer of the target.

    Attributes:
        num_routed: routed experts.
        num_shared: shared experts, which every token passes through.
        top_k: routed experts per token.
        num_per_gpu_at_ep8: routed experts that one of eight GPUs holds.
    """

    num_routed: Fact[int]
    num_shared: Fact[int]
    top_k: Fact[int]
    num_per_gpu_at_ep8: Fact[int]


class Draft(_Entry):
    """The DSpark draft model.

    Attributes:
        num_stages: stages, each with its own experts.
        num_routed: routed experts per stage.
        top_k: routed experts per token.
        block_tokens: tokens drafted per step.
    """

    num_stages: Fact[int]
    num_routed: Fact[int]
    top_k: Fact[int]
    block_tokens: Fact[int]


class Engram(_Entry):
    """The Engram tables, which can lie outside the GPU's memory.

    Attributes:
        layers: the layers that look rows up.
        num_rows: rows per layer.
        row_dimensions: numbers per row.
        num_parameters: parameters of all tables.
    """

    layers: Fact[Numbers]
    num_rows: Fact[int]
    row_dimensions: Fact[int]
    num_parameters: Fact[int]


class Checkpoint(_Entry):
    """The checkpoint by part.

    Attributes:
        total_gib: all of it; the parts leave under one GiB unnamed.
        expert_gib: routed experts of the target and of the draft, without scales.
        expert_entries: weights in those experts.
        draft_expert_entries: the draft's part of them.
        expert_bits: bits of one such weight, without scales.
        engram_gib: the Engram tables.
        dense_gib: attention, dense layers and routers.
        embedding_gib: embedding and LM head.
        scale_gib: the scales of the quantised weights.
    """

    total_gib: Fact[float]
    expert_gib: Fact[float]
    expert_entries: Fact[int]
    draft_expert_entries: Fact[int]
    expert_bits: Fact[int]
    engram_gib: Fact[float]
    dense_gib: Fact[float]
    embedding_gib: Fact[float]
    scale_gib: Fact[float]


class Model(_Entry):
    """One model.

    Attributes:
        name: as its maker writes it.
        num_layers: encoder and decoder layers together.
        num_encoder_layers: the half that prefill runs.
        num_decoder_layers: the other half.
        hidden_size: width of the residual stream.
        max_context_tokens: longest context.
        attention: attention and KV cache.
        experts: the experts of a layer.
        draft: the draft model.
        engram: the Engram tables.
        checkpoint: the checkpoint by part.
    """

    name: str
    num_layers: Fact[int]
    num_encoder_layers: Fact[int]
    num_decoder_layers: Fact[int]
    hidden_size: Fact[int]
    max_context_tokens: Fact[int]
    attention: Attention
    experts: Experts
    draft: Draft
    engram: Engram
    checkpoint: Checkpoint


class Hardware(_Entry):
    """One GPU and the units it comes in.

    Attributes:
        name: as the vendor writes it, also the word in the column ``hardware``.
        hbm_tb_per_s: nominal memory bandwidth of one GPU, 1 TB = 10^12 B.
        hbm_gb: nominal memory capacity of one GPU, 1 GB = 10^9 B.
        gpus_per_node: GPUs in one node.
        gpus_per_rack: GPUs in one rack that shares an NVLink domain.
    """

    name: str
    hbm_tb_per_s: Fact[float]
    hbm_gb: Fact[float]
    gpus_per_node: Fact[int]
    gpus_per_rack: Fact[int]


class PriceList(_Entry):
    """Prices in USD per million tokens.

    Attributes:
        cache_hit: an input token that the prefix cache holds.
        cache_miss: any other input token.
        output: an output token.
    """

    cache_hit: Fact[float]
    cache_miss: Fact[float]
    output: Fact[float]


class Prices(_Entry):
    """The two price lists of one model, and when the dearer one applies.

    Attributes:
        name: the model, as its maker writes it.
        time_zone: IANA name of the zone in which the hours count.
        weekdays: days that have peak hours.
        excluded_days: days without peak hours, in words.
        peak_hours: spans of hours, from and to, in which ``peak`` applies.
        off_peak: the list outside those hours.
        peak: the list inside them.
    """

    name: str
    time_zone: str
    weekdays: tuple[Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"], ...] = Field(strict=False)
    excluded_days: str
    peak_hours: Fact[Spans]
    off_peak: PriceList
    peak: PriceList


def model(name: str) -> Model:
    """Look a model up.

    Args:
        name: file name in ``data/models``, e.g. "deepseek-v4.1-flash".

    Raises:
        DataError: no such model, or its file is malformed.
    """
    return _entry("models", name, Model)


def hardware(name: str) -> Hardware:
    """Look a GPU up.

    Args:
        name: file name in ``data/hardware``, e.g. "gb300".

    Raises:
        DataError: no such hardware, or its file is malformed.
    """
    return _entry("hardware", name, Hardware)


def prices(name: str) -> Prices:
    """Look the prices of a model up.

    Args:
        name: file name in ``data/prices``, the same as the model's.

    Raises:
        DataError: no prices of such a model, or the file is malformed.
    """
    return _entry("prices", name, Prices)


def names(folder: Literal["models", "hardware", "prices"]) -> tuple[str, ...]:
    """What the catalog holds of one kind, sorted."""
    return tuple(sorted(path.stem for path in (DATA / folder).glob("*.toml")))


def facts(record: BaseModel, path: str = "") -> Iterator[tuple[str, Fact[Any]]]:
    """Every fact of a record by its path, e.g. ``attention.replay_tokens``, in the order of the record."""
    for name in type(record).model_fields:
        value = getattr(record, name)
        if isinstance(value, Fact):
            yield f"{path}{name}", value
        elif isinstance(value, BaseModel):
            yield from facts(value, f"{path}{name}.")


@cache
def _entry(folder: Literal["models", "hardware", "prices"], name: str, kind: type[_Entry]) -> Any:
    if name not in names(folder):
        raise DataError(one_of(name, names(folder), f"entry of data/{folder}"))
    return records.read(DATA / folder / f"{name}.toml", kind)

import tomllib

import pytest

from rackbook import catalog, records
from rackbook.catalog import Fact, Hardware, Model, Prices
from rackbook.errors import DataError
from rackbook.locations import DATA

MODEL = "deepseek-v4.1-flash"
GIB = 2**30


def all_records():
    kinds = {"models": catalog.model, "hardware": catalog.hardware, "prices": catalog.prices}
    return [(f"{folder}/{name}", read(name)) for folder, read in kinds.items() for name in catalog.names(folder)]


def test_every_file_of_the_catalog_is_read():
    files = {f"{path.parent.name}/{path.stem}" for path in DATA.glob("*/*.toml")}
    wanted = {
        f"models/{MODEL}",
        f"prices/{MODEL}",
        *(f"hardware/{gpu}" for gpu in ("b200", "gb200", "b300", "gb300", "h200")),
    }
    assert wanted <= files
    assert wanted == {name for name, _ in all_records()}


# Typed by hand from the reports and the recipe.
MODEL_NUMBERS = {
    "num_layers": 40,
    "num_encoder_layers": 20,
    "num_decoder_layers": 20,
    "hidden_size": 5120,
    "max_context_tokens": 1_048_576,
    "attention.kv_bytes_per_token": 890,
    "attention.sliding_window_tokens": 128,
    "attention.full_index_layers": (2, 8, 14),
    "attention.full_index_compression": 2,
    "attention.kv_compressing_layers": (2, 8, 14, 20),
    "attention.replay_boundary_layer": 20,
    "attention.replay_layers": (21, 39),
    "attention.replay_tokens": 128,
    "attention.indexer_latents_per_query": 512,
    "attention.indexer_blocks": 2048,
    "attention.indexer_block_size": 8,
    "experts.num_routed": 384,
    "experts.num_shared": 1,
    "experts.top_k": 6,
    "experts.num_per_gpu_at_ep8": 48,
    "draft.num_stages": 3,
    "draft.num_routed": 128,
    "draft.top_k": 3,
    "draft.block_tokens": 5,
    "engram.layers": (1, 14),
    "engram.num_rows": 384_000_000,
    "engram.row_dimensions": 256,
    "engram.num_parameters": 196_600_000_000,
    "checkpoint.total_gib": 476,
    "checkpoint.expert_gib": 259.5,
    "checkpoint.expert_entries": 557_200_000_000,
    "checkpoint.draft_expert_entries": 14_000_000_000,
    "checkpoint.expert_bits": 4,
    "checkpoint.engram_gib": 183.1,
    "checkpoint.dense_gib": 6.9,
    "checkpoint.embedding_gib": 3.9,
    "checkpoint.scale_gib": 21.9,
}


def test_the_model_has_the_printed_numbers():
    assert {path: fact.value for path, fact in catalog.facts(catalog.model(MODEL))} == MODEL_NUMBERS


def test_the_numbers_of_the_model_fit_each_other():
    model = catalog.model(MODEL)
    weights, engram = model.checkpoint, model.engram
    parts = [
        weights.expert_gib,
        weights.engram_gib,
        weights.dense_gib,
        weights.embedding_gib,
        weights.scale_gib,
    ]
    assert 0 <= weights.total_gib.known - sum(part.known for part in parts) < 1
    assert weights.expert_entries.known * weights.expert_bits.known / 8 / GIB == pytest.approx(259.5, abs=0.05)
    assert engram.num_rows.known * engram.row_dimensions.known * len(engram.layers.known) == pytest.approx(
        196.6e9, rel=1e-3
    )
    assert engram.num_parameters.known / GIB == pytest.approx(weights.engram_gib.known, abs=0.05)
    assert model.num_encoder_layers.known + model.num_decoder_layers.known == model.num_layers.known
    assert model.experts.num_routed.known == 8 * model.experts.num_per_gpu_at_ep8.known


@pytest.mark.parametrize(
    ("name", "bandwidth", "capacity", "node", "rack"),
    [
        ("b200", 8.0, None, None, None),
        ("gb200", 8.0, None, None, None),
        ("b300", 8.0, 288, 8, None),
        ("gb300", 8.0, 288, None, 72),
        ("h200", 4.8, 141, None, None),
    ],
)
def test_the_hardware_has_the_stated_numbers_and_a_reason_for_the_others(name, bandwidth, capacity, node, rack):
    gpu = catalog.hardware(name)
    stated = (gpu.hbm_tb_per_s, gpu.hbm_gb, gpu.gpus_per_node, gpu.gpus_per_rack)
    assert tuple(fact.value for fact in stated) == (bandwidth, capacity, node, rack)
    assert all(fact.missing_reason for fact in stated if fact.value is None)
    assert gpu.name == name.upper()


def test_a_number_that_several_sources_print_is_looked_up_in_another_one():
    assert catalog.model(MODEL).experts.top_k.elsewhere("S1").source == "S2"
    assert catalog.model(MODEL).experts.top_k.elsewhere("S2").source == "S1"
    assert catalog.model(MODEL).draft.top_k.elsewhere("S1").source == "vllm-recipe"
    assert catalog.model(MODEL).hidden_size.elsewhere("vllm-recipe") is None
    assert catalog.hardware("b200").hbm_gb.elsewhere("S1") is None
    other = {"value": 7, "source": "S2", "locator": "seven"}
    fact = Fact[int](value=6, unit="experts", source="S1", locator="six", also=[other])
    assert (fact.elsewhere("S1").value, fact.elsewhere("S2").value) == (7, 6), "they may differ"
    with pytest.raises(ValueError, match="each source prints a value once, got S2, S2"):
        Fact[int](value=6, unit="experts", source="S2", locator="six", also=[other])
    with pytest.raises(ValueError, match="unknown source: got 'S7'"):
        Fact[int](value=6, unit="experts", source="S1", locator="six", also=[other | {"source": "S7"}])
    with pytest.raises(ValueError, match="a missing value needs a missing_reason, and neither source nor locator"):
        Fact[int](unit="experts", missing_reason="not printed", also=[other])


def test_arithmetic_on_a_missing_number_is_refused_with_the_reason():
    with pytest.raises(DataError, match="a value in GB is missing: no source of this project gives it"):
        _ = catalog.hardware("b200").hbm_gb.known


def test_the_prices_double_in_peak_hours():
    prices = catalog.prices(MODEL)
    off_peak = [
        prices.off_peak.cache_hit.value,
        prices.off_peak.cache_miss.value,
        prices.off_peak.output.value,
    ]
    peak = [prices.peak.cache_hit.value, prices.peak.cache_miss.value, prices.peak.output.value]
    assert off_peak == [0.003, 0.15, 0.60]
    assert peak == [0.006, 0.30, 1.20]
    assert prices.peak_hours.value == ((9, 12), (14, 18))
    assert prices.time_zone == "Asia/Shanghai"
    assert prices.weekdays == ("Mon", "Tue", "Wed", "Thu", "Fri")


def test_every_quote_of_the_reports_stands_in_them(source_texts):
    quoted = [
        (where, path, quote)
        for where, record in all_records()
        for path, fact in catalog.facts(record)
        for quote in (fact, *fact.also)
        if quote.source in source_texts
    ]
    assert len(quoted) > 10
    wrong = [(where, path) for where, path, quote in quoted if source_texts[quote.source].count(quote.locator) != 1]
    assert wrong == []


@pytest.mark.parametrize(
    ("lookup", "name", "message"),
    [
        (
            catalog.model,
            "deepseek-v4",
            "unknown entry of data/models: got 'deepseek-v4', allowed: deepseek-v4.1-flash",
        ),
        (
            catalog.hardware,
            "gb30",
            "unknown entry of data/hardware: got 'gb30', allowed: b200, .*Did you mean 'gb300'",
        ),
        (catalog.hardware, "GB300", "unknown entry of data/hardware: got 'GB300'"),
        (catalog.prices, "", "unknown entry of data/prices: got '', allowed: deepseek-v4.1-flash"),
    ],
)
def test_a_misspelt_name_lists_the_valid_ones(lookup, name, message):
    with pytest.raises(DataError, match=message):
        lookup(name)


@pytest.mark.parametrize(
    ("kind", "file", "old", "new", "complaint"),
    [
        (
            Hardware,
            "hardware/gb300",
            "hbm_gb =",
            "hbm_gbs =",
            "field hbm_gb: got nothing, it must be there",
        ),
        (
            Hardware,
            "hardware/gb300",
            "hbm_gb =",
            "hbm_gbs =",
            "unknown key: got 'hbm_gbs', allowed: gpus_per_node, gpus_per_rack, hbm_gb, hbm_tb_per_s, name.",
        ),
        (
            Hardware,
            "hardware/gb300",
            "value = 288",
            "value = '288'",
            "field hbm_gb.value: got '288', input should be a valid number",
        ),
        (
            Hardware,
            "hardware/gb300",
            "value = 288",
            "valu = 288",
            "field hbm_gb.valu: unknown key: got 'valu', allowed: also, locator, missing_reason, note, ",
        ),
        (
            Hardware,
            "hardware/gb300",
            "value = 288, ",
            "",
            "a missing value needs a missing_reason, and neither source nor locator",
        ),
        (Hardware, "hardware/gb300", 'source = "S1", ', "", "a value needs source and locator"),
        (
            Hardware,
            "hardware/gb300",
            'source = "S1"',
            'source = "S7"',
            "unknown source: got 'S7', allowed: S1, S2",
        ),
        (
            Hardware,
            "hardware/gb300",
            'note = "nominal"',
            'missing_reason = "x"',
            "a value that is there has no missing_reason",
        ),
        (Hardware, "hardware/gb300", 'name = "GB300"', "name", "not valid TOML"),
        (
            Model,
            f"models/{MODEL}",
            "sliding_window_tokens = { value = 128",
            "sliding_window_tokens = { value = 128.5",
            "got 128.5",
        ),
        (
            Model,
            f"models/{MODEL}",
            "num_stages =",
            "num_stage =",
            "field draft.num_stage: unknown key: got 'num_stage', allowed: block_tokens, num_routed, ",
        ),
        (Prices, f"prices/{MODEL}", '"Mon"', '"Monday"', "field weekdays.0: got 'Monday'"),
    ],
)
def test_a_malformed_file_names_itself_and_the_field(tmp_path, kind, file, old, new, complaint):
    text = (DATA / f"{file}.toml").read_text("utf-8")
    assert old in text
    path = tmp_path / "broken.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(DataError, match=r"broken\.toml: ") as caught:
        records.read(path, kind)
    assert complaint in str(caught.value)


def test_a_record_cannot_be_changed():
    gpu = catalog.hardware("gb300")
    with pytest.raises(ValueError, match="frozen"):
        gpu.hbm_gb.value = 300
    assert tomllib.loads((DATA / "hardware" / "gb300.toml").read_text("utf-8"))["hbm_gb"]["value"] == gpu.hbm_gb.value

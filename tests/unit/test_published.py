import re
from datetime import date

import polars as pl
import pytest

from rackbook import published
from rackbook.errors import DataError
from rackbook.locations import DATA
from rackbook.tables import PUBLISHED, SCHEMAS
from rackbook.tables.schema import PROVENANCE

NEAR = 60
"""Characters around a quote in which the row's numbers are looked for."""

# Not printed as a number near the quote, or at all: a word stands for them.
IN_WORDS = {
    ("decode_parity_prefill", "num_redundant_experts", 0),
    ("dp_imbalance", "lag_s_per_rank", 0.0),
    ("single_user", "concurrency", 1),
}


def printed(value):
    """The ways in which a number or a day may stand in the reports."""
    if isinstance(value, date):
        return {f"{value.month}월 {value.day}일"}
    plain = {f"{value:g}", f"{value:.1f}", f"{value:.2f}", f"{value:,.0f}", f"{value:.0f}"}
    spellings = {text for text in plain if float(text.replace(",", "")) == value}
    for unit, letter in ((1e3, "K"), (1024, "K"), (1e6, "M")):
        short = {f"{value / unit:g}", f"{value / unit:.1f}"}
        spellings |= {f"{text}{letter}" for text in short if float(text) * unit == pytest.approx(value, rel=1e-9)}
    if value == 131072:
        spellings.add("131K")
    return spellings


def stands_in(value, text):
    """Whether the number stands in the text as a whole number, not as a part of a longer one."""
    return any(re.search(rf"(?<![\d.,]){re.escape(spelling)}(?![\d]|[.,]\d|[KM])", text) for spelling in printed(value))


def surroundings(locator, text):
    """Each quote of a locator with the characters around it, joined."""
    parts = []
    for quote in locator.split(" … "):
        start = text.index(quote)
        parts.append(text[max(0, start - NEAR) : start + len(quote) + NEAR])
    return " … ".join(parts)


def report_rows():
    return [
        (table, number, row)
        for table in PUBLISHED
        for number, row in enumerate(published.read(table).iter_rows(named=True), start=2)
        if row["source"] in ("S1", "S2")
    ]


def numbers(row, columns):
    cells = [(name, row[name]) for name in columns]
    return [(n, v) for n, v in cells if isinstance(v, (int, float, date)) and not isinstance(v, bool)]


def test_every_file_has_a_schema_and_every_published_schema_a_file():
    assert sorted(path.stem for path in (DATA / "published").glob("*.csv")) == sorted(PUBLISHED)


@pytest.mark.parametrize("table", PUBLISHED)
def test_a_null_anywhere_in_a_row_is_explained(table):
    own = [c.name for c in SCHEMAS[table].columns if c.name not in PROVENANCE]
    rows = published.read(table)
    silent = rows.filter(pl.any_horizontal(pl.col(own).is_null()) & pl.col("missing_reason").is_null())
    assert silent.to_dicts() == []


def test_the_source_of_a_row_is_primary_for_the_reports_and_outside_for_the_rest():
    roles = {key: entry.role for key, entry in published.sources().items()}
    assert {key for key, role in roles.items() if role == "primary"} == {"S1", "S2"}
    used = {source for table in PUBLISHED for source in published.read(table)["source"]}
    assert used <= set(roles)
    assert {"S1", "S2", "vllm-recipe", "inferencex-3344", "package-index"} <= used


def test_every_quote_stands_once_in_its_report(source_texts):
    wrong = {
        (table, number, quote): source_texts[row["source"]].count(quote)
        for table, number, row in report_rows()
        for quote in row["locator"].split(" … ")
        if source_texts[row["source"]].count(quote) != 1
    }
    assert wrong == {}


def test_the_numbers_of_a_row_stand_near_its_quote(source_texts):
    wrong = [
        f"{table}.csv, row {number}, column {name}: {value} is not near {row['locator']!r}"
        for table, number, row in report_rows()
        for name, value in numbers(row, SCHEMAS[table].values)
        if (table, name, value) not in IN_WORDS
        and not stands_in(value, surroundings(row["locator"], source_texts[row["source"]]))
    ]
    assert wrong == []


def test_the_conditions_of_a_row_stand_in_its_report(source_texts):
    wrong = [
        f"{table}.csv, row {number}, column {name}: {value} is nowhere in {row['source']}"
        for table, number, row in report_rows()
        for name, value in numbers(row, SCHEMAS[table].coordinates)
        if (table, name, value) not in IN_WORDS and not stands_in(value, source_texts[row["source"]])
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("value", "text", "found"),
    [
        (64990, "| 64,990 |", True),
        (64990, "| 164,990 |", False),
        (954000, "GPU당 954K tokens/s", True),
        (53300, "64.4K 대 53.3K", True),
        (65000, "65.0K", True),
        (16.1, "step 16.10에서", True),
        (16.1, "16.15", False),
        (1.5, "11.5ms", False),
        (131072, "131K, nextn=3", True),
        (875520, "855K에서", True),
        (8, "8,192", False),
        (8, "8.86", False),
        (52_000_000, "약 52M 토큰", True),
        (date(2026, 10, 9), "#59894, 10월 9일", True),
        (date(2026, 10, 9), "#59894, 10월 19일", False),
    ],
)
def test_the_search_for_a_number_knows_its_spellings(value, text, found):
    assert stands_in(value, text) is found


# Typed by hand from the reports: table, conditions, column, value.
SPOT = [
    (
        "context_sweep",
        {"context_tokens": 65536, "ep_size": 32, "requests_per_rank": 16},
        "step_ms",
        8.86,
    ),
    ("context_sweep", {"context_tokens": 131072}, "step_ms", 8.93),
    ("context_sweep", {"context_tokens": 875520, "hardware": "GB300"}, "step_ms", 9.53),
    ("step_breakdown", {"component": "moe", "requests_per_rank": 64}, "step_share_percent", 62),
    (
        "step_breakdown",
        {"component": "attention_indexer", "context_tokens": 131072},
        "step_share_percent",
        13,
    ),
    ("wide_ep_scaling", {"component": "moe", "ep_size": 4}, "step_ms", 13.4),
    ("wide_ep_scaling", {"component": "moe", "ep_size": 32}, "step_ms", 6.0),
    ("wide_ep_scaling", {"component": "rest", "ep_size": 32, "approximate": True}, "step_ms", 10),
    ("prefill_ablation", {"pr": 59894, "new_tokens": 32768}, "gain_percent", 19.9),
    ("prefill_ablation", {"pr": 59894, "new_tokens": 4096}, "gain_percent", 10.1),
    ("prefill_ablation", {"pr": 59894, "new_tokens": 65536}, "gain_percent", 23.1),
    ("prefill_ablation", {"pr": 62359}, "gain_percent", 2.8),
    ("prefill_ablation", {"pr": 62240, "cached_tokens": 131072}, "gain_percent", 15.6),
    (
        "prefill_ablation_total",
        {"min_new_tokens": 4096, "max_new_tokens": 65536},
        "min_gain_percent",
        35.6,
    ),
    (
        "prefill_ablation_total",
        {"min_new_tokens": 4096, "max_new_tokens": 65536},
        "max_gain_percent",
        43.9,
    ),
    ("prefill_ablation_throughput", {"stage": "before"}, "prefill_tok_per_s_per_gpu", 71_200),
    (
        "prefill_ablation_throughput",
        {"stage": "after", "new_tokens": 65536},
        "prefill_tok_per_s_per_gpu",
        102_500,
    ),
    ("dp_imbalance", {"dp_size": 2, "schedule": "mirror"}, "total_tok_per_s", 138_700),
    (
        "dp_imbalance",
        {"dp_size": 2, "schedule": "lag", "lag_s_per_rank": 5},
        "total_tok_per_s",
        130_500,
    ),
    (
        "dp_imbalance",
        {"dp_size": 4, "schedule": "mirror", "prefix_caching": False},
        "total_tok_per_s",
        267_600,
    ),
    ("dp_imbalance", {"dp_size": 4, "schedule": "lag"}, "total_tok_per_s", 231_100),
    (
        "dp_imbalance_prefill_only",
        {"dp_size": 2, "concurrency": 256},
        "prefill_tok_per_s_per_gpu",
        64_400,
    ),
    (
        "dp_imbalance_prefill_only",
        {"dp_size": 4, "concurrency": 256},
        "prefill_tok_per_s_per_gpu",
        53_300,
    ),
    (
        "expert_balance",
        {"part": "target", "routing": "uniform", "top_k": 6},
        "balancedness_per_layer_step",
        0.96,
    ),
    (
        "expert_balance",
        {"part": "draft", "routing": "uniform", "top_k": 3},
        "balancedness_per_layer_step",
        0.94,
    ),
    (
        "expert_balance",
        {"part": "target", "routing": "observed", "placement": "static"},
        "balancedness_per_layer_step",
        0.35,
    ),
    ("expert_balance", {"part": "target", "placement": "eplb"}, "balancedness_per_layer_step", 0.94),
    (
        "expert_balance",
        {"part": "draft", "routing": "observed", "placement": "static"},
        "balancedness_per_layer_step",
        0.21,
    ),
    ("expert_balance", {"part": "draft", "placement": "eplb"}, "balancedness_per_layer_step", 0.89),
    ("expert_balance_eplb", {"source": "S1", "window_steps": 1000}, "interval_steps", 3000),
    ("expert_balance_eplb", {"source": "vllm-recipe", "ep_size": 32}, "num_redundant_experts", 32),
    ("engine_gap", {"ep_size": 32}, "step_ms", 17.57),
    ("engine_gap", {"ep_size": 16}, "step_ms", 13.84),
    ("engine_gap_gpu", {"ep_size": 32, "baseline_ep_size": 16}, "gpu_saving_ms", 1.1),
    ("cpu_overhead", {"pr": 61121, "stage": "before"}, "total_tok_per_s_per_gpu", 141_000),
    (
        "cpu_overhead",
        {"pr": 61121, "stage": "before", "approximate": True},
        "interactivity_p90_tok_per_s",
        40,
    ),
    (
        "cpu_overhead",
        {"pr": 61121, "stage": "after", "num_prefill_engines": 8},
        "total_tok_per_s_per_gpu",
        440_000,
    ),
    (
        "cpu_overhead",
        {"pr": 61121, "stage": "after", "concurrency": 3072},
        "interactivity_p90_tok_per_s",
        159,
    ),
    ("cpu_overhead", {"pr": 61767, "stage": "before", "ep_size": 32}, "dp_sync_ms", 10.8),
    ("cpu_overhead", {"pr": 61767, "stage": "after"}, "dp_sync_ms", 1.5),
    ("cpu_overhead", {"pr": 61767, "stage": "before"}, "step_ms", 16.10),
    ("cpu_overhead", {"pr": 61767, "stage": "after"}, "step_ms", 13.15),
    ("cpu_overhead", {"pr": 61725, "stage": "before"}, "admissions_per_step", 140),
    ("cpu_overhead", {"pr": 61725, "stage": "after"}, "admissions_per_step", 4),
    (
        "cpu_overhead",
        {"pr": 61725, "stage": "before", "num_prefill_engines": 7},
        "total_tok_per_s_per_gpu",
        460_000,
    ),
    (
        "cpu_overhead",
        {"pr": 61725, "stage": "after", "concurrency": 4800},
        "total_tok_per_s_per_gpu",
        516_000,
    ),
    ("cpu_overhead", {"pr": 61725, "stage": "before"}, "interactivity_p90_tok_per_s", 109),
    ("cpu_overhead", {"pr": 61725, "stage": "after"}, "interactivity_p90_tok_per_s", 153),
    (
        "cpu_overhead",
        {"pr": 59908, "stage": "before", "prompt_tokens": 875520},
        "admission_cpu_ms",
        38.8,
    ),
    ("cpu_overhead", {"pr": 59908, "stage": "after"}, "admission_cpu_ms", 6.0),
    ("serving_pareto", {"total_tok_per_s_per_gpu": 954_000}, "interactivity_p90_tok_per_s", 196),
    ("serving_pareto", {"total_tok_per_s_per_gpu": 440_000}, "interactivity_p90_tok_per_s", 159),
    ("serving_pareto", {"total_tok_per_s_per_gpu": 516_000}, "interactivity_p90_tok_per_s", 153),
    (
        "serving_pareto",
        {"prefill_chunk_tokens": 4096, "batch_cap": 64},
        "total_tok_per_s_per_gpu",
        90_885,
    ),
    (
        "serving_pareto",
        {"prefill_chunk_tokens": 4096, "batch_cap": 64},
        "interactivity_p90_tok_per_s",
        84.42,
    ),
    ("serving_pareto", {"prefill_chunk_tokens": 4096, "batch_cap": 64}, "ttft_p90_s", None),
    (
        "serving_pareto",
        {"prefill_chunk_tokens": 8192, "tp_size": 2},
        "total_tok_per_s_per_gpu",
        142_565,
    ),
    (
        "serving_pareto",
        {"prefill_chunk_tokens": 8192, "concurrency": 64},
        "interactivity_p90_tok_per_s",
        66.63,
    ),
    ("serving_pareto", {"prefill_chunk_tokens": 8192}, "ttft_p90_s", 17.01),
    ("serving_pareto", {"batch_cap": 128}, "total_tok_per_s_per_gpu", 89_801),
    ("serving_pareto", {"batch_cap": 128}, "interactivity_p90_tok_per_s", 84.62),
    ("serving_pareto", {"batch_cap": 128, "acceptance_length": 3.51}, "ttft_p90_s", 49.88),
    ("serving_pareto_speedup", {"source": "S1"}, "speedup", 7.9),
    ("serving_pareto_topology", {"concurrency": 3018}, "num_prefill_engines", 6),
    ("serving_pareto_topology", {"concurrency": 7388}, "max_seqs_per_rank", 50),
    ("serving_pareto_topology", {"concurrency": 10888}, "admissions_per_step", 5),
    ("serving_pareto_topology", {"concurrency": 9888, "ep_size": 16}, "max_seqs_per_rank", 253),
    (
        "decode_parity",
        {"min_batch_size": 8, "max_batch_size": 256, "nextn": 3},
        "max_difference_percent",
        6,
    ),
    ("decode_parity_prefill", {"engine": "DeepInfer"}, "num_redundant_experts", 32),
    ("decode_parity_prefill", {"engine": "DeepInfer"}, "replay_tokens", 140),
    ("decode_parity_prefill", {"engine": "vLLM", "parallelism": "DEP2"}, "replay_tokens", 128),
    ("single_user", {"hardware": "B300", "num_gpus": 4}, "interactivity_p90_tok_per_s", 826),
    ("single_node", {"engine": "vLLM", "input_tokens": 128}, "output_tok_per_s", 64_990),
    ("single_node", {"engine": "vLLM", "input_tokens": 128}, "total_tok_per_s", 73_114),
    ("single_node", {"engine": "vLLM", "input_tokens": 128, "concurrency": 2048}, "tpot_ms", 24.8),
    ("single_node", {"engine": "vLLM", "input_tokens": 1024}, "output_tok_per_s", 54_985),
    ("single_node", {"engine": "vLLM", "input_tokens": 1024}, "tpot_ms", 29),
    ("single_node", {"engine": "vLLM", "input_tokens": 1024}, "total_tok_per_s", None),
    ("single_node", {"engine": "DeepInfer", "input_tokens": 1024}, "output_tok_per_s", 27_906),
    ("single_node", {"engine": "vLLM", "input_tokens": 8192}, "output_tok_per_s", None),
    ("single_node_prefill", {"engine": "vLLM", "input_tokens": 8192}, "prefill_tok_per_s", 658_000),
    ("single_node_prefill", {"engine": "vLLM"}, "prefill_tok_per_s_per_gpu", 82_000),
    ("single_node_prefill", {"engine": "DeepInfer"}, "prefill_tok_per_s", 66_000),
    ("single_node_ratio", {"phase": "decode", "input_tokens": 1024}, "speedup", 2.0),
    ("single_node_ratio", {"phase": "decode", "input_tokens": 8192}, "speedup", 4.3),
    ("single_node_ratio", {"phase": "prefill"}, "speedup", 9),
    ("single_node_graphs", {"max_capture_tokens": 1536}, "output_tok_per_s", 37_200),
    ("single_node_graphs", {"max_capture_tokens": 8192}, "output_tok_per_s", 55_000),
    ("single_node_acceptance", {"input_tokens": 1024}, "acceptance_percent", 19),
    ("single_node_acceptance", {"input_tokens": 8192}, "acceptance_percent", 12),
    ("single_node_memory", {"hardware": "B300"}, "weights_gib_per_gpu", 46),
    ("single_node_memory", {"hardware": "B300"}, "kv_cache_gib_per_gpu", 160),
    ("single_node_memory", {"hardware": "B300"}, "kv_cache_tokens_per_rank", 52_000_000),
    ("single_node_memory", {"hardware": "B300", "max_seqs_per_node": 2048}, "max_seqs_per_rank", 256),
    ("single_node_memory", {"hardware": "H200", "num_gpus": 4}, "weights_gib_per_gpu", 81.2),
    ("single_node_memory", {"hardware": "H200"}, "kv_cache_gib_per_gpu", 38.5),
    ("single_node_memory", {"hardware": "H200"}, "kv_cache_tokens_per_rank", 20_000_000),
    ("single_node_setup", {"engine": "DeepInfer", "needs_rdma": True}, "min_nvcc_version", "13.1"),
    ("single_node_deployment", {"phase": "prefill"}, "num_gpus", 4),
    ("single_node_deployment", {"phase": "decode"}, "num_gpus", 64),
    ("release_map", {"version": "0.32.0", "source": "S1"}, "released_on", date(2026, 10, 18)),
    ("release_map", {"version": "0.33.0", "source": "package-index"}, "released_on", date(2026, 11, 2)),
    ("release_map_prs", {"pr": 61339, "state": "merged"}, "merged_on", date(2026, 10, 14)),
    ("release_map_prs", {"pr": 61868, "state": "merged"}, "merged_on", date(2026, 10, 21)),
    ("release_map_prs", {"pr": 62698, "state": "merged"}, "merged_on", date(2026, 10, 25)),
    ("release_map_prs", {"pr": 61121, "state": "open"}, "merged_on", None),
    ("release_map_stack", {"version": "0.29.0", "weeks_behind": 6}, "releases_behind", 3),
    ("cost", {"price_period": "off-peak", "hardware": "GB300"}, "usd_per_gpu_hour", 38.96),
]


@pytest.mark.parametrize(("table", "where", "column", "value"), SPOT, ids=lambda part: str(part)[:40])
def test_a_printed_number_is_there(table, where, column, value):
    conditions = [pl.col(name) == wanted for name, wanted in where.items()]
    assert published.read(table).filter(*conditions)[column].to_list() == [value]


def test_sixteen_pull_requests_ten_of_them_open():
    states = published.read("release_map_prs")["state"].to_list()
    assert (states.count("merged"), states.count("open")) == (6, 10)


def test_both_sources_of_a_release_give_the_same_day():
    days = published.read("release_map").group_by("version").agg(pl.col("released_on").n_unique())
    assert days["released_on"].to_list() == [1] * 5


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with the real register and one table to break."""
    (tmp_path / "published").mkdir()
    (tmp_path / "sources.toml").write_bytes((DATA / "sources.toml").read_bytes())
    (tmp_path / "published" / "context_sweep.csv").write_bytes((DATA / "published" / "context_sweep.csv").read_bytes())
    monkeypatch.setattr(published, "DATA", tmp_path)
    published.sources.cache_clear()
    yield tmp_path
    published.sources.cache_clear()


def edit(path, old, new):
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_an_unregistered_source_is_refused(folder):
    edit(folder / "published" / "context_sweep.csv", ",S1,8.93ms", ",S9,8.93ms")
    with pytest.raises(
        DataError,
        match=r"context_sweep\.csv, row 3, column source: unknown source: got 'S9', allowed: S1, S2",
    ):
        published.read("context_sweep")


def test_a_row_that_is_not_published_is_refused(folder):
    edit(folder / "published" / "context_sweep.csv", "published,S1,8.93ms,", "derived,S1,8.93ms,1 + 1")
    with pytest.raises(DataError, match=r"context_sweep\.csv, row 3, column origin: got 'derived', allowed: published"):
        published.read("context_sweep")


@pytest.mark.parametrize("name", ["contxt_sweep", "context_growth"])
def test_a_table_without_a_file_is_refused(name):
    with pytest.raises(DataError, match=f"unknown published table: got '{name}', allowed: context_sweep, "):
        published.read(name)


def test_a_misspelt_source_lists_the_registered_ones():
    assert published.source("S1").date == date(2026, 10, 25)
    with pytest.raises(DataError, match=r"unknown source: got 'vllm-recipes', .*Did you mean 'vllm-recipe'"):
        published.source("vllm-recipes")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('role = "primary"', 'role = "main"', "S1: field role: got 'main'"),
        ("licence =", "license =", "S1: field licence: got nothing"),
        ("licence =", "license =", "unknown key: got 'license', allowed: date, licence"),
        ("title =", "title", "not valid TOML"),
    ],
)
def test_a_malformed_register_names_file_source_and_field(folder, old, new, complaint):
    edit(folder / "sources.toml", old, new)
    with pytest.raises(DataError, match=r"sources\.toml: ") as caught:
        published.sources()
    assert complaint in str(caught.value)


def test_a_source_without_a_date_says_so_in_its_note():
    for key, entry in published.sources().items():
        assert entry.date or "date" in entry.note or "day" in entry.note, key

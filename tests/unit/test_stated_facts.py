"""Facts of the model, the hardware and the deployments in one table, and second prints of one number."""

import polars as pl
import pytest

from rackbook import catalog
from rackbook.experiments import stated_facts
from rackbook.tables import COLUMNS


def row(frame, **where):
    return frame.row(by_predicate=pl.all_horizontal(pl.col(name) == value for name, value in where.items()), named=True)


def test_every_fact_of_the_catalog_is_in_the_table():
    facts = stated_facts.facts()
    gpus = [catalog.hardware(name) for name in catalog.names("hardware")]
    assert facts.height == sum(len(list(catalog.facts(r))) for r in (catalog.model(stated_facts.MODEL), *gpus))
    assert facts.select(pl.struct("subject", "quantity").is_duplicated().any()).item() is False
    assert set(facts.columns) <= set(COLUMNS)


@pytest.mark.parametrize(
    ("subject", "quantity", "fact", "source"),
    [
        ("DeepSeek-V4.1-Flash", "hidden size", "5,120", "vllm-recipe"),
        ("DeepSeek-V4.1-Flash", "attention: full index layers", "2, 8, 14", "S1"),
        ("DeepSeek-V4.1-Flash", "experts: top k", "6", "S1+S2+vllm-recipe"),
        ("DeepSeek-V4.1-Flash", "checkpoint: expert gib", "259.5", "vllm-recipe"),
        ("GB300", "hbm tb per s", "8.0", "vendor-hardware"),
    ],
)
def test_a_fact_has_its_number_and_all_that_print_it(subject, quantity, fact, source):
    found = row(stated_facts.facts(), subject=subject, quantity=quantity)
    assert (found["fact"], found["source"], found["missing_reason"]) == (fact, source, None)


def test_a_fact_that_nobody_gives_says_why():
    found = row(stated_facts.facts(), subject="H200", quantity="gpus per node")
    assert (found["fact"], found["source"]) == (None, None)
    assert found["missing_reason"] == "neither report states it"


def test_the_deployments_keep_every_setting_of_the_recipe():
    found = stated_facts.deployments().filter(pl.col("source") == "vllm-recipe")
    names = ("concurrency", "ep_size", "num_prefill_engines", "max_seqs_per_rank", "admissions_per_step")
    assert found.select(*names, "num_redundant_experts").rows() == [
        (3018, 32, 6, 18, 2, 32),
        (7388, 32, 12, 50, 4, 32),
        (10888, 32, 16, 76, 5, 32),
        (9888, 16, 12, 253, 6, 16),
    ]
    assert found["window_steps"].to_list() == [1000] * 4
    assert set(found.columns) <= set(COLUMNS)


def test_a_second_print_is_found_in_another_source_than_the_claims():
    top_k = catalog.model(stated_facts.MODEL).experts.top_k
    finding = stated_facts.printed_elsewhere(top_k, "S2")
    assert (finding.found, finding.basis, finding.note) == (6, "derived", "printed by S1 as well")
    alone = stated_facts.printed_elsewhere(catalog.model(stated_facts.MODEL).hidden_size, "vllm-recipe")
    assert (alone.found, alone.note) == (None, "no other source at hand prints it")

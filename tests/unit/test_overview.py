"""Experiment 00: the board, its counts, its tables and charts."""

import pytest
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook import claims
from rackbook.charts import board as charts
from rackbook.experiments import load, notebook_names
from rackbook.experiments import overview as experiment


def verdict(identity: str, found, *, value=10.0, basis="derived", tolerance=1.0, settlement=None) -> claims.Verdict:
    claim = claims.Claim(
        id=identity, statement=f"Statement | of {identity}", value=value, unit="ms", tolerance=tolerance, source="S1",
        locator="x", settlement=settlement,
    )  # fmt: skip
    note = "nothing here bears on it" if found is None else ""
    return claims.Verdict(claim, claims.Finding(found, None if found is None else basis, note))


@pytest.fixture
def verdicts():
    return claims.Verdicts(
        [
            verdict("context_sweep.a", 10.5),
            verdict("context_sweep.b", 10.2, basis="simulated"),
            verdict("cost.c", 20.0),
            verdict("cost.d", 20.0, basis="measured"),
            verdict("cost.e", None, settlement="price_page"),
            verdict("cost.f", None, settlement="price_page"),
        ]
    )


def test_counts_by_notebook_and_verdict(verdicts):
    counted = {(r["notebook"], r["verdict"]): r["num_claims"] for r in experiment.counts(verdicts).to_dicts()}
    assert counted == {
        ("01_context_sweep", "consistent"): 1,
        ("01_context_sweep", "reproduced"): 1,
        ("14_cost", "inconsistent"): 1,
        ("14_cost", "refuted"): 1,
        ("14_cost", "open"): 2,
    }


def test_ratios_are_of_settled_numbers_only(verdicts):
    ratios = experiment.ratios(verdicts)
    assert ratios["claim"].to_list() == ["context_sweep.a", "context_sweep.b", "cost.c", "cost.d"]
    assert ratios["difference_percent"].to_list() == pytest.approx([5, 2, 100, 100])


def test_tables_link_into_notebooks_and_escape(verdicts):
    table = experiment.linked_table(verdicts)
    assert table.count("[14_cost](14_cost.ipynb)") == 4
    assert "Statement \\| of cost.c" in table


def test_open_claims_are_grouped_by_what_settles_them(verdicts):
    text = experiment.open_claims(verdicts)
    assert text.count("**price_page**") == 1
    assert text.count("- Statement") == 2
    assert claims.register().settlements["price_page"].needs[:20] in text


def test_an_open_claim_that_no_run_settles_is_listed_with_its_reason():
    text = experiment.open_claims(claims.Verdicts([verdict("cost.e", None), verdict("cost.f", None)]))
    assert text.startswith("**no run settles these** — nothing here bears on it\n\n- Statement")


def test_the_parameter_selects_what_is_listed(monkeypatch, verdicts):
    monkeypatch.setattr(experiment, "board", lambda: verdicts)
    evidence = experiment.collect(experiment.Params(verdicts=["open"]))
    assert [v.verdict for v in evidence.selected] == ["open", "open"]
    assert len(evidence.board) == 6
    assert len(experiment.collect(experiment.Params()).selected) == 6
    with pytest.raises(ValidationError):
        experiment.Params(verdicts=["maybe"])


def test_every_topic_has_an_experiment_and_a_notebook():
    names = notebook_names()
    for topic in {claim.topic for claim in claims.register().claims}:
        assert topic in names
        assert load(topic).CHECKS.topic == topic


def test_charts(verdicts):
    spec = check_chart(charts.verdicts_by_notebook(experiment.counts(verdicts)), name="verdicts_by_notebook")
    assert spec["title"]["text"] == "4 of 6 claims have a verdict, 2 are open"
    spec = check_chart(charts.found_against_claimed(experiment.ratios(verdicts)), name="found_against_claimed")
    assert spec["title"]["text"] == "2 of 4 settled numbers lie within their tolerance"

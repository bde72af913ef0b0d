import ast
import json
import math
import operator
import os
import re
import tomllib

import pytest

from rackbook import claims
from rackbook.claims import OPEN, Checks, Claim, Finding, Register, Verdict, Verdicts, read_register, register
from rackbook.errors import DataError
from rackbook.locations import DATA

CHECKOUT = DATA.parent
SEEDS = (CHECKOUT / os.environ.get("RACKBOOK_REALDATA", "../shared/realdata")).parent / "seeds"
SEED_NAMES = {"S1": "000_*.txt", "S2": "002_*.txt"}

TOPICS = [
    "context_sweep", "step_breakdown", "wide_ep_scaling", "prefill_ablation", "dp_imbalance", "expert_balance",
    "cpu_overhead", "engine_gap", "serving_pareto", "decode_parity", "single_user", "single_node", "release_map",
    "cost",
]  # fmt: skip


def claim(**changes):
    fields = {
        "id": "toy.size", "statement": "It is 0.96.", "value": 0.96, "tolerance": 0.005, "source": "S1",
        "locator": "0.96", "settlement": "lab",
    }  # fmt: skip
    return Claim(**fields | changes)


def yes_no(value=True):
    return claim(id="toy.holds", statement="It holds.", value=value, tolerance=0)


def word(a_claim, found, basis):
    return Verdict(a_claim, Finding(found, basis)).verdict


# The register of the project


def test_every_topic_has_its_claims_in_notebook_order():
    found = [c.topic for c in register().claims]
    assert list(dict.fromkeys(found)) == TOPICS
    assert found == sorted(found, key=TOPICS.index), "the claims of a topic stand together"


@pytest.mark.parametrize("source", SEED_NAMES)
def test_printed_claims_quote_their_source(source):
    files = sorted(SEEDS.glob(SEED_NAMES[source]))
    if not files:
        pytest.skip(f"the text of {source} is not beside this checkout ({SEEDS})")
    text = files[0].read_text("utf-8")
    quotes = {c.id: c.locator for c in register().claims if c.kind == "printed" and c.source.split("+")[0] == source}
    assert quotes
    assert {id: text.count(quote) for id, quote in quotes.items() if text.count(quote) != 1} == {}


ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.Lt: operator.lt, ast.Gt: operator.gt,
}  # fmt: skip


def evaluate(node):
    """The value of an arithmetic expression; anything else in it is an error."""
    match node:
        case ast.Expression(body=body):
            return evaluate(body)
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return ARITHMETIC[type(op)](evaluate(left), evaluate(right))
        case ast.Compare(left=left, ops=ops, comparators=rights):
            values = [evaluate(side) for side in (left, *rights)]
            return all(ARITHMETIC[type(op)](a, b) for op, a, b in zip(ops, values[:-1], values[1:], strict=True))
    raise AssertionError(f"not arithmetic: {ast.unparse(node)}")


def derived_formulas():
    derived = [c for c in register().claims if c.kind == "derived"]
    return [c for c in derived if not c.locator.startswith("Monte Carlo: ")]


@pytest.mark.parametrize("derived", derived_formulas(), ids=lambda c: c.id)
def test_a_derived_claim_follows_from_its_formula(derived):
    formula = derived.locator.split(";")[0].strip()
    value = evaluate(ast.parse(formula, mode="eval"))
    assert word(derived, value, "derived") == "consistent", f"{formula} = {value}, claimed {derived.value}"


def raw_claims():
    """The claims with their values and tolerances as they are spelt, and the lines above the tolerance."""
    text = (DATA / "claims.toml").read_text("utf-8")
    spelt = tomllib.loads(text, parse_float=str)["claim"]
    blocks = [block.split("\n\n")[0] for block in text.split("[[claim]]\n")[1:]]
    assert len(spelt) == len(blocks)
    pairs = zip(spelt, blocks, strict=True)
    return [(fields, block) for fields, block in pairs if not isinstance(fields["value"], bool)]


@pytest.mark.parametrize(("fields", "block"), raw_claims(), ids=lambda x: x["id"] if isinstance(x, dict) else "")
def test_a_tolerance_is_half_a_unit_of_the_last_digit_or_says_why_not(fields, block):
    assert f'id = "{fields["id"]}"' in block
    value, tolerance = str(fields["value"]), float(fields.get("tolerance", 0))
    if "." in value:
        allowed = [0.5 * 10.0 ** -len(value.split(".")[1])]
    else:
        allowed = [0.5 * 10**k for k in range(len(value) - len(value.rstrip("0")) + 1)]
    if tolerance and not any(math.isclose(tolerance, a) for a in allowed):
        assert re.search(r"^# .+\ntolerance = ", block, re.MULTILINE), f"{tolerance} for {value} without a comment"


@pytest.mark.parametrize("key", register().settlements)
def test_a_settlement_is_used_and_explains_its_variables(key):
    settlement = register().settlements[key]
    assert any(c.settlement == key for c in register().claims)
    if settlement.command is None:
        assert re.search(r"\bno (vLLM|run)\b", settlement.needs, re.IGNORECASE), "needs says why no run settles it"
        return
    used = " ".join("".join(m) for m in re.findall(r"\$\(\((.*?)\)\)|\$(\w+)", settlement.command))
    variables = set(re.findall(r"[A-Z_]{2,}", used))
    assigned = set(re.findall(r"^([A-Z_]+)=", settlement.command, re.MULTILINE))
    assert {v for v in variables - assigned if not re.search(rf"\b{v}\b", settlement.needs)} == set()


# Verdicts


@pytest.mark.parametrize(
    ("basis", "inside", "outside"),
    [
        ("simulated", "reproduced", "inconsistent"),
        ("derived", "consistent", "inconsistent"),
        ("modelled", "consistent", "inconsistent"),
    ],
)
def test_the_word_follows_from_the_basis_and_the_tolerance(basis, inside, outside):
    for found in (0.96, 0.955, 0.965):
        assert word(claim(), found, basis) == inside
    for found in (0.954999, 0.965001, 0.0):
        assert word(claim(), found, basis) == outside


@pytest.mark.parametrize("rounding", [0.0005, 0.3])
def test_a_new_measurement_may_differ_by_five_percent_or_the_claims_own_tolerance(rounding):
    printed = claim(value=2.0, tolerance=rounding)
    limit = max(0.1, rounding)
    for sign in (-1, 1):
        assert word(printed, 2 + sign * limit * 0.999, "measured") == "reproduced"
        assert word(printed, 2 + sign * limit * 1.001, "measured") == "refuted"
    verdict = Verdict(printed, Finding(2.0, "measured"))
    assert Verdicts([verdict]).records()[0]["tolerance"] == verdict.tolerance == pytest.approx(limit)
    assert Verdict(printed, Finding(2.0, "derived")).tolerance == rounding


def test_without_a_finding_a_claim_is_open():
    verdict = Verdict(claim(), OPEN)
    assert verdict.verdict == "open"
    assert math.isnan(verdict.difference)


@pytest.mark.parametrize("value", [True, False])
def test_a_yes_no_claim_holds_or_does_not(value):
    assert word(yes_no(value), value, "derived") == "consistent"
    assert word(yes_no(value), not value, "derived") == "inconsistent"
    assert word(yes_no(value), not value, "measured") == "refuted"


def test_an_exact_claim_allows_nothing():
    exact = claim(value=48, tolerance=0, unit="experts")
    assert word(exact, 384 / 8, "derived") == "consistent"
    assert word(exact, 48.001, "derived") == "inconsistent"


def test_the_rounding_of_binary_numbers_is_no_difference():
    assert Verdict(claim(value=0.6, tolerance=0), Finding(9.53 - 8.93, "derived")).difference == 0
    assert Verdict(claim(value=57780, tolerance=5), Finding(57775.0, "derived")).verdict == "consistent"


def test_the_difference_is_found_minus_claimed():
    assert Verdict(claim(value=9, tolerance=0.58), Finding(9.97, "derived")).difference == pytest.approx(0.97)


@pytest.mark.parametrize("found", [math.nan, math.inf, "0.96", None])
def test_a_finding_is_a_finite_value_or_nothing(found):
    with pytest.raises(ValueError, match="a finding"):
        Finding(found, "derived")


def test_a_finding_needs_a_basis():
    with pytest.raises(ValueError, match="a value and a basis, or neither"):
        Finding(0.96)


def test_a_finding_of_the_wrong_kind_names_the_claim():
    with pytest.raises(DataError, match=r"toy\.holds: its check found 1\.97, expected true or false"):
        Verdict(yes_no(), Finding(1.97, "derived"))
    with pytest.raises(DataError, match=r"toy\.size: its check found True, expected a number \[ms\]"):
        Verdict(claim(unit="ms"), Finding(True, "derived"))


def test_an_open_verdict_says_why():
    with pytest.raises(DataError, match=r"toy\.size is open without a reason"):
        Verdict(claim(settlement=None), OPEN)
    assert Verdict(claim(settlement=None), Finding(None, note="the catalog has no row")).verdict == "open"


# Files of claims

CLAIM = """
[[claim]]
id = "toy.size"
statement = "It is 0.96."
value = 0.96
tolerance = 0.005
source = "S1"
locator = "0.96"
settlement = "lab"
"""
LAB = """
[settlement.lab]
needs = "A laboratory."
command = "measure"
"""


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "claims.toml"
        path.write_text(text, "utf-8")
        return path

    return write


def test_a_file_is_read_with_its_settlements(toml):
    found = read_register(toml(CLAIM + LAB))
    assert found.claims == (claim(),)
    assert found.settlements["lab"].command == "measure"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (CLAIM + CLAIM + LAB, r"claims\.toml: claim toy\.size stands twice"),
        (CLAIM.replace('"S1"', '"S1+S9"') + LAB, r"toy\.size: unknown source: got 'S9', allowed: .*S1, S2"),
        (CLAIM, r"toy\.size: unknown settlement: got 'lab', allowed: \(none\)"),
        (CLAIM.replace("lab", "labs") + LAB, r"unknown settlement: got 'labs', allowed: lab\. Did you mean 'lab'"),
        ("[[claim]\n", r"claims\.toml: not valid TOML: .*line 1"),
        (LAB, r"claims\.toml: field claim: got nothing"),
        (CLAIM.replace("statement", "statment") + LAB, r"field claim\.0\.statment: .*Did you mean 'statement'"),
        (CLAIM.replace("0.005", "-1") + LAB, r"claim\.0\.tolerance: got -1"),
        (CLAIM.replace("toy.size", "size") + LAB, r"claim\.0\.id: got 'size'"),
        (CLAIM.replace("value = 0.96", 'value = "yes"') + LAB, r"claim\.0\.value\.\w+: got 'yes'"),
        (CLAIM.replace("value = 0.96", "value = true") + LAB, r"a true/false claim has neither unit nor tolerance"),
    ],
)
def test_a_bad_file_is_refused_with_its_fault(toml, text, complaint):
    with pytest.raises(DataError, match=complaint):
        read_register(toml(text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.toml: no such file"):
        read_register(tmp_path / "nowhere.toml")


# Checks


@pytest.fixture
def small(monkeypatch):
    """A register of two claims of one topic and one of another."""
    found = Register(
        claim=(claim(), yes_no(), claim(id="other.size")),
        settlement={"lab": {"needs": "A laboratory.", "command": "measure"}},
    )
    monkeypatch.setattr(claims, "register", lambda: found)
    return found


@pytest.fixture
def judged(small):
    checks = Checks("toy")
    checks("holds")(lambda _: OPEN)
    checks("size")(lambda evidence: Finding(evidence, "simulated", "20 draws"))
    return checks.judge(0.957)


def test_checks_judge_their_own_topic_in_register_order(judged):
    assert [v.claim.id for v in judged] == ["toy.size", "toy.holds"]
    assert [v.verdict for v in judged] == ["reproduced", "open"]
    assert len(judged) == 2


def test_one_function_may_judge_several_claims(small):
    checks = Checks("toy")
    checks("holds", "size")(lambda _: OPEN)
    assert Verdicts(checks.judge(None)).counts()["open"] == 2


def test_a_claim_without_a_check_is_named(small):
    checks = Checks("toy")
    checks("size")(lambda _: OPEN)
    with pytest.raises(DataError, match=r"claims without a check: toy\.holds$"):
        checks.judge(None)


def test_a_check_without_a_claim_is_named(small):
    checks = Checks("toy")
    checks("size", "holds", "weight")(lambda _: OPEN)
    with pytest.raises(DataError, match=r"checks without a claim: toy\.weight$"):
        checks.judge(None)


def test_a_claim_has_one_check():
    checks = Checks("toy")
    checks("size")(lambda _: OPEN)
    with pytest.raises(DataError, match=r"toy\.size has two checks"):
        checks("size")(lambda _: OPEN)


# What a person and the suite read


def test_a_record_holds_the_claim_the_finding_and_what_would_settle_it(judged):
    size, holds = judged.records()
    assert size == {
        "id": "toy.size", "statement": "It is 0.96.", "value": 0.96, "unit": "", "tolerance": 0.005, "kind": "printed",
        "source": "S1", "locator": "0.96", "found": 0.957, "difference": pytest.approx(-0.003), "verdict": "reproduced",
        "basis": "simulated", "note": "20 draws", "topic": "toy", "needs": None, "command": None,
    }  # fmt: skip
    assert (holds["found"], holds["difference"], holds["basis"]) == (None, None, None)
    assert (holds["needs"], holds["command"]) == ("A laboratory.", "measure")
    assert json.loads(json.dumps(judged.records(), allow_nan=False))


def test_counts_name_every_word(judged):
    assert judged.counts() == {"reproduced": 1, "consistent": 0, "inconsistent": 0, "refuted": 0, "open": 1}


def test_the_frame_shows_both_numbers(judged):
    size, holds = judged.frame().to_dicts()
    columns = ("published", "here", "difference", "tolerance")
    assert [size[c] for c in columns] == ["0.96", "0.957", "-0.003", "± 0.005"]
    assert [holds[c] for c in columns] == ["yes", "–", "", "exact"]


def test_a_notebook_gets_every_row_and_rounded_records(small):
    many = Verdicts([Verdict(claim(id=f"toy.n{i}"), Finding(0.96 + 1e-13 * i, "measured")) for i in range(70)])
    bundle = many._repr_mimebundle_()
    assert "toy.n35" in bundle["text/html"]
    assert "toy.n35" in bundle["text/plain"]
    assert {record["found"] for record in bundle[claims.MIME]} == {0.96}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (False, "no"),
        (0.0, "0"),
        (0.01134, "0.01134"),
        (9.969697, "9.97"),
        (954000, "954,000"),
    ],
)
def test_a_value_is_shown_in_four_digits(value, text):
    assert claims.shown_value(value) == text


def test_a_difference_shows_its_sign():
    assert claims.shown_value(0.97, signed=True) == "+0.97"
    assert claims.shown_value(-12345.0, signed=True) == "-12,345"

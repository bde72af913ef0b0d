"""Every command line and every case that a plan holds, through the parsers of vLLM 0.33.0 itself."""

import re

import pytest
import vllm_033

from rackbook import clusters, plans
from rackbook.engine import lab_settings, launch
from rackbook.engine.cases import Case
from rackbook.engine.fit import UnfitError

ON_THE_LAB = ("dp_imbalance", "expert_balance", "engine_gap", "single_node")
"""Experiments that the CPU lab measures as they come; the context sweep only without drafts."""

VARIANTS = {
    "context_sweep": {"measured_contexts": [4096], "measured_draft_tokens": 0, "measured_ranks": 4},
    "step_breakdown": {"measured_draft_tokens": 0, "measured_requests_per_rank": 1, "measured_ranks": 4},
    "wide_ep_scaling": {"measured_ep_sizes": [4, 2], "draft_tokens": 0},
    "prefill_ablation": {"measured_fixes": ["engram"], "measured_new_tokens": [2], "measured_ranks": 8},
    "decode_parity": {"measured_batch_sizes": [1], "draft_tokens": 2},
    "serving_pareto": {"measured_prefill_engines": 1, "measured_decode_ranks": 4, "workload_path": "trace.jsonl"},
    "engine_gap": {"measured_ep_sizes": [4], "measured_draft_tokens": 0},
    "single_node": {"measured_prefill_tokens": None, "measured_ranks": 4, "draft_tokens": 0},
}
"""Other settings, so that every branch of a plan is parsed."""

WRONG = [
    ["bench", "forward", "--model", "m", "--kv-len-jiter", "0"],
    ["serve", "m", "--moe-backend", "deep_gemm_mega_moo"],
    ["serve", "m", "--max-num-batched-token", "8"],
]
"""What the parsers must refuse, or the test could not fail."""


def _vllm(arguments: tuple[str, ...]) -> list[str] | None:
    """The words for vLLM's parser; None for a process that is none of its."""
    if launch.VLLM in arguments:
        return list(arguments[arguments.index(launch.VLLM) + 1 :])
    if launch.LAB_BENCH in arguments:
        return list(arguments[arguments.index(launch.LAB_BENCH) + 1 :])
    if lab_settings.SERVER in arguments:
        words = list(arguments[arguments.index(lab_settings.SERVER) + 1 :])
        assert words[0] == "--model"
        return ["serve", words[1], *words[2:]]
    return None


@pytest.fixture(scope="module")
def planned():
    """Each plan's processes: (topic, cluster, settings) and what vLLM would be given."""
    found = []
    for topic in plans.TOPICS:
        for name in clusters.names():
            for settings in ({}, VARIANTS.get(topic, {})):
                without_drafts = topic == "context_sweep" and settings
                if name == "cpu-lab" and topic not in ON_THE_LAB and not without_drafts:
                    with pytest.raises(UnfitError):
                        plans.plan(topic, settings, name)
                    continue
                plan = plans.plan(topic, settings, name)
                for process in plan.processes:
                    words = _vllm(process.arguments)
                    assert words is not None or process.role == "router", process
                    if words is not None:
                        found.append(((topic, name, process.role), words))
    return found


@pytest.fixture(scope="module")
def answered(planned):
    cases = sorted({word for _, words in planned for word in words if re.match(r"[\w.-]+=\d", word)})
    lines = [words for _, words in planned]
    answer = vllm_033.ask([*lines, *WRONG], [*cases, "bad=6@4:5"])
    answer["wrong"] = answer["commands"][len(lines) :]
    answer["commands"] = answer["commands"][: len(lines)]
    return answer, cases


def test_the_parsers_are_those_of_0_33_0(answered):
    answer, _ = answered
    assert "vllm-files" in answer["file"]
    # what the lab's own 0.32.0 does not have
    assert any(entry["values"].get("bench_type") == "forward" for entry in answer["commands"])


def test_every_command_line_is_accepted_word_by_word(planned, answered):
    answer, _ = answered
    assert len(planned) > 200
    wrong = {
        f"{where}: {' '.join(words)}": entry
        for (where, words), entry in zip(planned, answer["commands"], strict=True)
        if "error" in entry or entry["unknown"]
    }
    assert wrong == {}


def test_the_values_arrive_as_meant(planned, answered):
    answer, _ = answered
    for (where, words), entry in zip(planned, answer["commands"], strict=True):
        values = entry["values"]
        if words[:2] == ["bench", "forward"]:
            assert values["case"] == [words[i + 1] for i, word in enumerate(words) if word == "--case"], where
            assert values["kv_len_jitter"] == 0, where
            assert values["load_format"] == "dummy", where
            assert values["enable_expert_parallel"] is True, where
        if words[0] == "serve" and "--data-parallel-size" in words:
            assert values["data_parallel_size"] == int(words[words.index("--data-parallel-size") + 1]), where
        if "--speculative-config" in words:
            assert values["speculative_config"]["method"] == "dspark", where


def test_every_case_is_read_as_it_was_meant(answered):
    answer, cases = answered
    assert len(cases) > 15
    for text, entry in zip(cases, answer["cases"], strict=False):
        case = Case.parse(text)
        requests = [
            [request.query_tokens, request.context_tokens, request.draft_tokens, request.chunked]
            for request in case.requests
            for _ in range(request.count)
        ]
        assert entry == {"name": case.name, "requests": requests}
    assert "error" in answer["cases"][-1]


def test_a_wrong_line_would_be_noticed(answered):
    misspelt, no_backend, abbreviated = answered[0]["wrong"]
    assert "--kv-len-jiter" in misspelt["error"]
    assert "deep_gemm_mega_moo" in no_backend["error"]
    assert abbreviated["unknown"] == ["--max-num-batched-token"]

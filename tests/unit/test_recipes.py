"""Recipes: what they put on a command line, and what a wrong file is told."""

import pytest

from rackbook import recipes
from rackbook.errors import DataError
from rackbook.recipes import Option, argument

GPUS = [name for name in recipes.names() if name != "cpu-lab-moe"]


@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_has_the_four_roles_and_says_how_far_each_argument_was_tried(name):
    found = recipes.recipe(name)
    assert set(found.roles) == set(recipes.ROLES)
    assert found.context_limit == 1_048_576
    assert all(option.checked for role in found.roles for option in found.options(role))
    # no GPU was there: nobody may claim that an argument ran on one
    assert not any("ran" in option.checked for role in found.roles for option in found.options(role))


def test_the_expert_kernel_of_the_10_x_gpus_is_not_asked_of_an_h200():
    for name in GPUS:
        words = recipes.recipe(name).arguments("aggregated")
        assert ("deep_gemm_mega_moe" in words) is (not name.endswith("h200"))
        assert "--enable-expert-parallel" in words
    h200 = [word for role in recipes.ROLES for word in recipes.recipe("deepseek-v4.1-flash-h200").arguments(role)]
    assert not any("mxfp4" in word or "FLASHINFER" in word for word in h200)


def test_single_user_shares_the_weights_and_nothing_else():
    found = recipes.recipe("deepseek-v4.1-flash-b300")
    assert found.role("single_user").gpus_per_rank == 4
    words = found.arguments("single_user")
    assert "--enable-expert-parallel" not in words
    assert words[words.index("--attention-config") + 1] == '{"indexer_kv_dtype":"mxfp4","indexer_sparse_logits":true}'


def test_flags_can_be_left_out_and_tables_become_json():
    found = recipes.recipe("deepseek-v4.1-flash-gb300")
    assert "--speculative-config" not in found.arguments("decode", without=("--speculative-config",))
    assert argument("--a", {"b": [1, True], "c": "d"}) == ("--a", '{"b":[1,true],"c":"d"}')
    assert argument("--a") == ("--a",)
    assert argument("--a", -1) == ("--a=-1",)


RECIPE = """
name = "own"
model_id = "models/own"
max_context_tokens = 8192
vllm = "0.33.0"
[startup]
dummy_minutes = 1.0
real_minutes = 2.0
basis = "assumed for this test"
[[option]]
flag = "--trust-remote-code"
checked = ["read"]
[roles.aggregated]
[[roles.aggregated.option]]
flag = "--block-size"
value = 8
checked = ["parsed"]
"""


def read(folder, **changes):
    text = RECIPE
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "own.toml"
    path.write_text(text, "utf-8")
    return recipes.recipe(str(path))


def test_an_own_recipe_is_one_file(tmp_path):
    found = read(tmp_path)
    assert found.arguments("aggregated") == ("--trust-remote-code", "--block-size", "8")
    assert (found.context_limit, found.model_name) == (8192, "models/own")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_context_tokens = 8192\n": ""}, "max_context_tokens: got nothing"),
        ({'"--block-size"': '"block-size"'}, r"roles.aggregated.option.0.flag: got 'block-size'"),
        ({"value = 8": "value = true"}, "a switch has no value"),
        ({'["parsed"]': '["tested"]'}, "checked.0: got 'tested'"),
        ({'["parsed"]': "[]"}, "checked"),
        ({'"--trust-remote-code"': '"--block-size"'}, "role aggregated: --block-size stands twice"),
        ({"[roles.aggregated]": "[roles.agregated]"}, "roles.agregated"),
        ({"max_context_tokens = 8192": 'model = "deepseek-v5"'}, "unknown model in data/models: got 'deepseek-v5'"),
        ({"dummy_minutes = 1.0": "dummy_minutes = 0.0"}, "startup.dummy_minutes"),
        (
            {"[startup]": 'environment = { HF_TOKEN = "x" }\n[startup]'},
            "environment: .*HF_TOKEN would lie in the folder",
        ),
        ({"[roles.aggregated]": '[roles.aggregated]\nenvironment = { A_SECRET = "x" }'}, "A_SECRET would lie in the"),
        ({'"--trust-remote-code"': '"--api-key"'}, "option.0.flag: got '--api-key'.*would see the secret"),
        ({"[startup]": 'router = ["r", "--api-key=x"]\n[startup]'}, "router: .*would see the secret"),
        (
            {"[roles.aggregated]": "[roles.aggregated]\ngpus_per_rank = 2"},
            "aggregated: gpus_per_rank: got 2, allowed: 1",
        ),
    ],
)
def test_a_wrong_recipe_is_told_what_is_wrong(tmp_path, changes, words):
    with pytest.raises(DataError, match=words):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--tensor-parallel-size",
            r"role aggregated: .*--tensor-parallel-size \(gpus_per_rank of the role single_user",
        ),
        ("--data-parallel-size", r"--data-parallel-size \(.*measured_ranks, measured_ep_sizes, ranks"),
        ("--pipeline-parallel-size", r"--pipeline-parallel-size \(a plan counts gpus_per_rank GPUs for each rank"),
        ("--data-parallel-start-rank", r"--data-parallel-start-rank \(the cluster's file"),
        ("--port", r"--port \(the plan chooses where a server listens"),
        ("--max-model-len", r"--max-model-len \(a plan takes it from the contexts or max_model_len"),
        ("--max-num-seqs", r"--max-num-seqs \(requests_per_rank or measured_requests_per_rank"),
        ("--tensor_parallel_size", "flag: got '--tensor_parallel_size'"),
        ("-tp", "flag: got '-tp'"),
    ],
)
@pytest.mark.parametrize("place", ['"--block-size"', '"--trust-remote-code"'], ids=["of a role", "of every role"])
def test_what_a_plan_or_its_launcher_sets_is_no_part_of_a_recipe(tmp_path, place, flag, words):
    with pytest.raises(DataError, match=words):
        read(tmp_path, **{place: f'"{flag}"'})


def test_a_role_whose_plan_sets_no_batch_may_have_one(tmp_path):
    def of(role):
        changes = {"[roles.aggregated]": f"[roles.{role}]", "roles.aggregated.option": f"roles.{role}.option"}
        return read(tmp_path, **changes, **{'"--block-size"': '"--max-num-seqs"'})

    assert of("prefill").arguments("prefill")[-2:] == ("--max-num-seqs", "8")
    with pytest.raises(DataError, match="role decode: .*measured_max_seqs of the notebook"):
        of("decode")


def test_an_unknown_role_or_recipe_lists_the_known_ones(tmp_path):
    with pytest.raises(DataError, match="own.toml: unknown role of the recipe own: got 'decode', allowed: aggregated"):
        read(tmp_path).role("decode")
    with pytest.raises(DataError, match="unknown recipe: got 'deepseek'"):
        recipes.recipe("deepseek")


def test_a_switch_with_a_truth_value_is_refused():
    with pytest.raises(ValueError, match="--no-"):
        Option(flag="--a", value=False, checked=("read",))


def test_the_example_of_the_readme_is_a_recipe(tmp_path):
    text = (recipes.FOLDER / "README.md").read_text("utf-8").split("```toml\n")[1].split("```")[0]
    (tmp_path / "mine.toml").write_text(text.replace('model = "my-model"', "#"), "utf-8")
    found = recipes.recipe(str(tmp_path / "mine.toml"))
    assert found.arguments("aggregated")[-1] == '{"method":"mtp","num_speculative_tokens":1}'

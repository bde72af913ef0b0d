"""Clusters: those that come with the project, a user's own, and what a wrong file is told."""

from pathlib import Path

import pytest

from rackbook import clusters, recipes
from rackbook.errors import DataError

OWN = """
name = "two trays"
hardware = "gb300"
compute_capability = "10.3"
hosts = 2
gpus_per_host = 4
recipe = "deepseek-v4.1-flash-gb300"
[launcher]
kind = "torchrun"
addresses = ["tray0", "tray1"]
"""


@pytest.fixture
def own(tmp_path):
    def write(text=OWN, **changes):
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "mine.toml"
        path.write_text(text, "utf-8")
        return str(path)

    return write


def test_the_project_s_clusters_have_the_sizes_that_the_sources_name():
    sizes = {name: (found.num_hosts, found.num_gpus_per_host, found.capability) for name, found in _all().items()}
    assert sizes == {
        "gb300-nvl72": (18, 4, "10.3"),
        "gb200-nvl72": (18, 4, "10.0"),
        "b300x8": (1, 8, "10.3"),
        "b200x8": (1, 8, "10.0"),
        "h200x8": (1, 8, "9.0"),
        "cpu-lab": (1, 0, None),
    }


def _all():
    return {name: clusters.cluster(name) for name in clusters.names()}


@pytest.mark.parametrize("name", clusters.names())
def test_every_hardware_number_has_an_origin_and_every_recipe_exists(name):
    found = clusters.cluster(name)
    for value in (found.gpus_per_host, found.compute_capability):
        assert found.is_lab or isinstance(value, clusters.Fact)
    assert found.num_hosts == 1 or isinstance(found.hosts, clusters.Fact)
    recipe = recipes.recipe(found.recipe)
    assert found.is_lab or found.hardware in recipe.hardware


@pytest.mark.parametrize("name", clusters.names())
def test_words_quoted_from_the_reports_stand_in_them(name, source_texts):
    found = clusters.cluster(name)
    for value in (found.hosts, found.gpus_per_host, found.compute_capability):
        if isinstance(value, clusters.Fact) and value.source in source_texts:
            assert value.locator in source_texts[value.source]


def test_an_own_file_states_own_numbers_and_is_read_again_when_it_changes(own):
    found = clusters.cluster(own())
    assert (found.key, found.num_gpus, found.address(1)) == ("mine", 8, "tray1")
    changed = own(**{"hosts = 2": "hosts = 1", '"tray0", "tray1"': '"tray0"'})
    assert clusters.cluster(changed).num_gpus == 4


def test_hosts_without_addresses_have_words_for_them():
    assert clusters.cluster("gb300-nvl72").address(17) == "HOST_17"
    assert clusters.cluster("b300x8").address(0) == "127.0.0.1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({'"gb300"': '"gb400"'}, "hardware: .*unknown GPU in data/hardware: got 'gb400'.*Did you mean 'gb300'"),
        ({"hosts = 2": "hosts = 0"}, "hosts"),
        ({"hosts = 2": "hosts = 3"}, "launcher.addresses: got 2, expected 3, one per host"),
        ({"gpus_per_host = 4": "gpus_per_host = 0"}, "one without names neither; got gpus_per_host 0"),
        ({'"10.3"': '"sm103"'}, "compute_capability"),
        ({"gpus_per_host": "gpus_per_hosts"}, "unknown key: got 'gpus_per_hosts'.*gpus_per_host"),
        ({'kind = "torchrun"': 'kind = "local"'}, "addresses belongs to the launcher 'torchrun', got 'local'"),
        ({'kind = "torchrun"': 'kind = "mpirun"'}, "launcher.kind: got 'mpirun'"),
        ({"hosts = 2": "hosts = 2 2"}, "not valid TOML"),
        ({"hosts = 2": 'hosts = { value = 2, unit = "trays" }'}, "source and locator"),
        (
            {"[launcher]": '[environment]\nHF_TOKEN = "x"\nNCCL_MNNVL_ENABLE = "1"\n[launcher]'},
            "environment: got .*HF_TOKEN would lie in the folder of every run.*environment of the process that runs",
        ),
        ({"hosts = 2": "hosts = 2\npython = []"}, "python: got nothing, which means the CPU lab"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(own, changes, words):
    path = own(**changes)
    with pytest.raises(DataError, match=words) as caught:
        clusters.cluster(path)
    assert "mine.toml" in str(caught.value)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=r"got 'gb300-nvl7', allowed: .*Did you mean 'gb300-nvl72'"):
        clusters.cluster("gb300-nvl7")
    with pytest.raises(DataError, match="no such file"):
        clusters.cluster(str(tmp_path / "none.toml"))
    with pytest.raises(DataError, match=f"{tmp_path}: not a readable file: Is a directory"):
        clusters.cluster(str(tmp_path))


def test_the_value_of_a_secret_is_not_repeated_and_counts_of_tokens_are_none(own):
    with pytest.raises(DataError) as caught:
        clusters.cluster(own(**{"[launcher]": '[environment]\nVLLM_API_KEY = "honey-4711"\n[launcher]'}))
    assert "honey-4711" not in str(caught.value)
    fine = "VLLM_MAX_TOKENS_PER_EXPERT", "TOKENIZERS_PARALLELISM", "NCCL_KEYS_X"
    variables = "\n".join(f'{name} = "1"' for name in fine)
    found = clusters.cluster(own(**{"[launcher]": f"[environment]\n{variables}\n[launcher]"}))
    assert tuple(found.environment) == fine


def test_a_recipe_of_ones_own_is_found_from_the_folder_of_the_cluster(own, monkeypatch):
    path = Path(own(**{'"deepseek-v4.1-flash-gb300"': '"recipes/mine.toml"'}))
    monkeypatch.chdir("/")
    assert clusters.cluster(str(path)).recipe == str(path.parent / "recipes" / "mine.toml")


def test_the_example_of_the_readme_is_a_cluster(tmp_path):
    text = (clusters.FOLDER / "README.md").read_text("utf-8").split("```toml\n")[1].split("```")[0]
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    found = clusters.cluster(str(tmp_path / "mine.toml"))
    assert (found.num_gpus, found.address(1), found.python) == (8, "10.0.0.2", ("/opt/vllm/bin/python",))

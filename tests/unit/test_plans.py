"""What the experiments would run: sizes, processes on their hosts, estimates, and refusals before anything starts."""

import shlex

import pytest

from rackbook import clusters, plans, recipes
from rackbook.commands.plans import plan as planned
from rackbook.engine import launch
from rackbook.engine.fit import UnfitError
from rackbook.engine.forward_run import cases_of
from rackbook.engine.plan import Plan, Process, Stage
from rackbook.errors import DataError, ParameterError

GPU_CLUSTERS = [name for name in clusters.names() if name != "cpu-lab"]


def words_of(process: Process) -> list[str]:
    return list(process.arguments[process.arguments.index(launch.VLLM) + 1 :])


def value(process: Process, flag: str) -> str:
    return process.arguments[process.arguments.index(flag) + 1]


@pytest.fixture
def trays(tmp_path):
    """Two trays of four GPUs that are reached by a command."""

    def write(kind="torchrun", extra='addresses = ["tray0", "tray1"]'):
        path = tmp_path / "trays.toml"
        path.write_text(
            'name = "two trays"\nhardware = "gb300"\ncompute_capability = "10.3"\nhosts = 2\ngpus_per_host = 4\n'
            f'recipe = "deepseek-v4.1-flash-gb300"\n[launcher]\nkind = "{kind}"\n{extra}\n'
        )
        return str(path)

    return write


@pytest.mark.parametrize("topic", plans.TOPICS)
@pytest.mark.parametrize("cluster", GPU_CLUSTERS)
def test_every_live_experiment_has_a_plausible_plan_on_every_cluster(topic, cluster):
    found = plans.plan(topic, None, cluster)
    assert 0 < found.num_gpus <= found.cluster.num_gpus
    assert found.gpu_minutes == pytest.approx(sum(s.num_gpus * s.minutes for s in found.stages))
    assert all(stage.basis for stage in found.stages)
    names = [stage.name for stage in found.stages]
    assert len(names) == len(set(names))
    for stage in found.stages:
        for group in ((*stage.services, *step) for step in (stage.steps or ((),))):
            for host in range(found.cluster.num_hosts):
                used = sum(process.num_gpus for process in group if process.host_index == host)
                spread = found.cluster.launcher.kind == "slurm" and group[0].arguments[0] == "srun"
                assert used <= (found.cluster.num_gpus if spread else found.cluster.num_gpus_per_host)


def test_the_context_sweep_is_the_published_one():
    (stage,) = plans.plan("context_sweep", None, "gb300-nvl72").stages
    (process,) = stage.processes
    assert [w for w in words_of(process) if w.startswith("c")] == [
        "c64k=16*6@65536:5", "c128k=16*6@131072:5", "c855k=16*6@875520:5",
    ]  # fmt: skip
    assert value(process, "--data-parallel-size") == "32"
    assert value(process, "--kv-len-jitter") == "0"
    assert stage.num_gpus == 32


@pytest.mark.parametrize("topic", [topic for topic in plans.TOPICS if hasattr(plans.load(topic), "cases")])
def test_the_batches_of_an_experiment_come_back_from_its_command_lines(topic):
    module = plans.load(topic)
    wanted = list(module.cases(module.Settings()))
    found = plans.plan(topic, None, "gb300-nvl72")
    timed = [stage for stage in found.stages if not stage.services]
    assert timed
    for stage in timed:
        cases, num_ranks = cases_of(stage)
        assert cases == wanted
        assert num_ranks == stage.num_gpus


def test_a_smaller_cluster_says_that_it_is_not_the_source_s(trays):
    found = plans.plan("context_sweep", None, "b300x8")
    assert (found.num_gpus, found.notes) == (
        8,
        ("8 ranks, as many as b300x8 allows; the source has 32: not its claim",),
    )


def test_torchrun_starts_each_host_on_its_own_and_the_first_one_here(trays):
    found = plans.plan("context_sweep", {"measured_ranks": 8}, trays())
    first, second = found.processes
    assert first.command == first.arguments
    assert value(first, "--master-addr") == value(second, "--master-addr") == "tray0"
    assert (value(first, "--node-rank"), value(second, "--node-rank")) == ("0", "1")
    assert second.command[:-1] == ("ssh", "-tt", "-o", "BatchMode=yes", "tray1")
    remote = shlex.split(second.command[-1])
    assert remote[0] == "env"
    assert remote[-len(second.arguments) :] == list(second.arguments)
    assert "VLLM_ENGINE_READY_TIMEOUT_S=3600" in remote


def test_slurm_starts_one_task_per_gpu(trays):
    path = trays("slurm", 'partition = "gpu"\nminutes = 30\noptions = ["--exclusive"]')
    (process,) = plans.plan("context_sweep", {"measured_ranks": 8}, path).processes
    assert process.arguments[:4] == ("srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4")
    assert {"--partition=gpu", "--time=30", "--exclusive", "--kill-on-bad-exit=1"} <= set(process.arguments)
    assert process.arguments[process.arguments.index(launch.VLLM) - 1] == "-m"
    assert process.num_gpus == 8


def test_a_server_s_processes_are_steps_that_share_their_allocation(trays):
    extra = 'partition = "gpu"\naccount = "a"\nminutes = 30\noptions = ["--exclusive", "--exclusive=user", "--qos=q"]'
    _, other = plans.plan("dp_imbalance", {"ranks": [8]}, trays("slurm", extra)).stage("dep8").services
    assert other.through == (
        "srun", "--nodes=1", "--ntasks=1", "--nodelist=HOST_1", "--gpus-per-node=4", "--overlap", "--time=30",
        "--qos=q",
    )  # fmt: skip


def test_a_server_on_several_hosts_has_one_head_and_ranks_that_follow(trays):
    found = plans.plan("engine_gap", {"measured_ep_sizes": [8]}, trays())
    head, other = found.stage("served_dep8").services
    assert value(head, "--data-parallel-size-local") == "4"
    assert "--headless" not in head.arguments
    assert "--port" in head.arguments
    assert value(other, "--data-parallel-start-rank") == "4"
    assert "--headless" in other.arguments
    assert "--port" not in other.arguments


def test_the_number_of_api_servers_is_not_told_to_a_host_that_has_none(trays):
    head, other = plans.plan("dp_imbalance", {"ranks": [8]}, trays()).stage("dep8").services
    assert value(head, "--api-server-count") == "1"
    assert "--headless" in other.arguments
    assert "--api-server-count" not in other.arguments  # vLLM refuses both together
    assert [word for word in words_of(other) if word not in words_of(head)] == [
        "--data-parallel-start-rank", "--headless",
    ]  # fmt: skip


def test_prefill_and_decode_engines_share_no_gpu_and_no_port():
    found = plans.plan("serving_pareto", None, "gb300-nvl72")
    services = found.stages[0].services
    places = [
        (process.host_index, gpu)
        for process in services
        for gpu in (process.environment.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",") if process.num_gpus else ())
    ]
    assert len(places) == len(set(places)) == 6 * 2 + 32
    ports = [(p.host_index, value(p, "--port")) for p in services if p.role != "router"]
    assert len(ports) == len(set(ports))
    channels = [(p.host_index, p.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for p in services if p.role == "prefill"]
    assert len(channels) == len(set(channels)) == 6
    router = services[-1]
    assert router.arguments.count("--prefill") == 6
    assert router.arguments.count("--decode") == 8


@pytest.fixture
def recipe(tmp_path):
    """A recipe, the GB300's unless named, with one text in place of another."""

    def write(old, new, name="deepseek-v4.1-flash-gb300"):
        text = (recipes.FOLDER / f"{name}.toml").read_text()
        assert text.count(old) == 1
        path = tmp_path / "own.toml"
        path.write_text(text.replace(old, new))
        return str(path)

    return write


def test_engines_that_leave_gpus_of_a_host_free_share_none_with_the_decode_engine(recipe):
    wanted = {"measured_prefill_engines": 2, "measured_decode_ranks": 1}
    gb200 = (
        "gb200-nvl72",
        recipe(  # no source gives its memory, so one GPU is not found too small
            "[roles.prefill]\nnum_ranks = 2", "[roles.prefill]\nnum_ranks = 3", "deepseek-v4.1-flash-gb200"
        ),
    )
    services = plans.plan("serving_pareto", wanted, *gb200).stages[0].services
    places = [
        (process.role, process.host_index, process.environment["CUDA_VISIBLE_DEVICES"])
        for process in services
        if process.num_gpus
    ]
    assert places == [("prefill", 0, "0,1,2"), ("prefill", 1, "0,1,2"), ("decode", 1, "3")]
    services = plans.plan("serving_pareto", wanted | {"measured_decode_ranks": 2}, *gb200).stages[0].services
    (decode,) = [process for process in services if process.role == "decode"]
    assert (decode.host_index, decode.environment["CUDA_VISIBLE_DEVICES"]) == (2, "0,1")


def test_sizes_whose_weights_do_not_fit_the_memory_are_left_out_and_said():
    # 141 GB × 0.92 = 120.8 GiB; (259.5 + 21.9) / 2 + 6.9 + 3.9 = 151.5 GiB, over four 81.15 GiB
    found = plans.plan("dp_imbalance", {"ranks": [2, 4]}, "h200x8")
    assert [stage.name for stage in found.stages] == ["dep4"]
    assert found.effective["ranks"] == [4]
    assert found.notes[0] == (
        "left out, because weights do not fit into 120.8 GiB on each H200, 0.92 of its memory: DEP2 (151.5 GiB)"
    )
    sweep = plans.plan("wide_ep_scaling", {"measured_ep_sizes": [1, 2, 4, 16]}, "h200x8")
    assert [stage.name for stage in sweep.stages] == ["ep4"]
    assert sweep.notes[0] == "left out, because h200x8 has 8 GPUs: EP16"
    assert sweep.notes[1].endswith("EP1 (292.2 GiB), EP2 (151.5 GiB)")
    assert [s.name for s in plans.plan("dp_imbalance", {"ranks": [2, 4]}, "b300x8").stages] == ["dep2", "dep4"]


@pytest.mark.parametrize(
    ("topic", "settings", "words"),
    [
        ("dp_imbalance", {"ranks": [2]}, "120.8 GiB on each H200.*needed: 151.5 GiB.*over 2 GPUs, random.*Raise ranks"),
        ("context_sweep", {"measured_ranks": 2}, "needed: 151.5 GiB for the weights.*Raise measured_ranks"),
        ("single_node", {"measured_ranks": 2}, "needed: 151.5 GiB for the weights.*Raise measured_ranks"),
        ("serving_pareto", {"measured_prefill_engines": 1, "measured_decode_ranks": 2}, "Raise measured_decode_ranks"),
        ("step_breakdown", {"measured_requests_per_rank": 512}, "about 38.9M tokens of KV cache.*needed: 67.1M tokens"),
        ("decode_parity", {"measured_batch_sizes": [256]}, "about 20.6M tokens.*needed: 33.6M.*raise measured_ranks"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_memory_of_a_gpu_is_refused(topic, settings, words):
    with pytest.raises(UnfitError, match=words):
        plans.plan(topic, settings, "h200x8")


def test_the_recipe_s_share_of_the_memory_counts(recipe):
    half = recipe(
        "[roles.aggregated]\n", '[roles.aggregated]\n[[roles.aggregated.option]]\nflag = "--gpu-memory-utilization"\n'
        'value = 0.5\nchecked = ["read"]\n'
    )  # fmt: skip
    with pytest.raises(UnfitError, match="found 134.1 GiB on each GB300, 0.5 of its memory.*needed: 151.5 GiB"):
        plans.plan("context_sweep", {"measured_ranks": 2}, "gb300-nvl72", half)


def test_batches_whose_kv_cache_has_no_room_are_left_out_and_said():
    # (120.8 − 81.15) GiB at the 38.5 GiB ÷ 20M tokens that a source prints: 20.6M; 256 × 131,072 = 33.6M
    found = plans.plan("decode_parity", None, "h200x8")
    assert [str(case).partition("=")[0] for case in cases_of(found.stages[0])[0]] == ["b8", "b16", "b32", "b64", "b128"]
    assert "about 20.6M tokens" in found.notes[0]
    assert found.notes[0].endswith("at the 2,067 B/token that vllm-recipe prints for the H200): batches of 256")
    more = plans.plan("decode_parity", {"measured_ranks": 8}, "h200x8")
    assert len(cases_of(more.stages[0])[0]) == 6
    assert len(cases_of(plans.plan("decode_parity", None, "b300x8").stages[0])[0]) == 6


@pytest.mark.parametrize(
    ("topic", "words"),
    [
        ("context_sweep", "Set measured_draft_tokens to 0, or add --speculative-config to "),
        ("step_breakdown", "Set measured_draft_tokens to 0, or add"),
        ("wide_ep_scaling", "Set draft_tokens to 0 and acceptance_length to 1, or add"),
        ("engine_gap", "Set measured_draft_tokens to 0, or add"),
        ("single_node", "Set draft_tokens to 0 and acceptance_length to 1, or add"),
        ("decode_parity", r"for 3 drafts\. Add --speculative-config"),
        ("single_user", r"for 5 drafts\. Add --speculative-config"),
    ],
)
def test_without_a_drafter_the_notebook_s_own_parameter_is_named(recipe, topic, words):
    drafter = '"--speculative-config"\nvalue = { method = "dspark", num_speculative_tokens = 5 }'
    none = recipe(drafter, '"--block-size"\nvalue = 64')
    with pytest.raises(UnfitError, match=words):
        plans.plan(topic, None, "gb300-nvl72", none)


def test_a_role_may_have_the_drafter_for_itself(recipe):
    own = recipe(
        '[[option]]\nflag = "--speculative-config"', '[[roles.aggregated.option]]\nflag = "--speculative-config"'
    )
    (process,) = plans.plan("context_sweep", None, "gb300-nvl72", own).processes
    assert value(process, "--speculative-config") == '{"method":"dspark","num_speculative_tokens":5}'


def test_a_rank_that_no_host_has_room_for_is_refused(recipe):
    with pytest.raises(
        UnfitError, match="hosts of 4 GPUs on gb300-nvl72; needed: 8 in one for a rank. Set gpus_per_rank"
    ):
        plans.plan("single_user", {}, "gb300-nvl72", recipe("gpus_per_rank = 4", "gpus_per_rank = 8"))


@pytest.mark.parametrize(
    ("topic", "setting", "value"),
    [
        ("context_sweep", "measured_contexts", [4096, 4096]),
        ("wide_ep_scaling", "measured_ep_sizes", [4, 8, 4]),
        ("single_node", "measured_captures", [64, 64]),
        ("serving_pareto", "measured_concurrency", [8, 8]),
        ("prefill_ablation", "measured_fixes", ["replay", "replay"]),
    ],
)
def test_a_value_that_stands_twice_is_refused(topic, setting, value):
    with pytest.raises(ParameterError, match=rf"{setting}: got \[.*\], allowed: different values, each once"):
        plans.plan(topic, {setting: value}, "gb300-nvl72")


def test_without_room_for_a_published_deployment_a_smaller_one_is_planned_and_said():
    found = plans.plan("serving_pareto", None, "b300x8")
    assert found.num_gpus == 6
    assert any("not one of the published deployments" in note for note in found.notes)
    with pytest.raises(UnfitError, match="found 8 GPUs on b300x8; needed: 44. Lower measured_prefill_engines"):
        plans.plan("serving_pareto", {"measured_prefill_engines": 6, "measured_decode_ranks": 32}, "b300x8")


def test_switches_that_a_gpu_lacks_are_left_out_by_name():
    full = plans.plan("prefill_ablation", None, "b300x8")
    assert [stage.name for stage in full.stages] == [
        "baseline", "replay_off", "engram_on", "engram_off", "indexer_on", "indexer_off",
    ]  # fmt: skip
    part = plans.plan("prefill_ablation", None, "h200x8")
    assert [stage.name for stage in part.stages] == ["baseline", "replay_off", "engram_on", "engram_off"]
    assert "DeepSelect" in part.notes[0]
    off = full.stage("engram_off").processes[0]
    assert value(off, "--engram-config") == '{"dp_shared_memory":false}'


def test_a_switch_is_laid_over_the_recipe_s_own_table(recipe):
    found = plans.plan("prefill_ablation", None, "h200x8")
    assert [value(stage.processes[0], "--engram-config") for stage in found.stages] == [
        '{"cpu_offload":true}',
        '{"cpu_offload":true}',
        '{"cpu_offload":true,"use_thp":true}',
        '{"cpu_offload":true,"dp_shared_memory":false}',
    ]
    assert all(stage.processes[0].arguments.count("--engram-config") == 1 for stage in found.stages)
    own = recipe("[roles.aggregated]\n", '[roles.aggregated]\n[[roles.aggregated.option]]\nflag = "--engram-config"\n'
                 'value = { use_thp = false, cpu_offload = true }\nchecked = ["read"]\n')  # fmt: skip
    (process,) = plans.plan("prefill_ablation", None, "gb300-nvl72", own).stage("engram_on").processes
    assert value(process, "--engram-config") == '{"use_thp":true,"cpu_offload":true}'  # the switch has the last word


def test_the_specialised_decode_is_planned_only_where_the_gpu_has_it():
    assert [s.name for s in plans.plan("single_user", None, "b300x8").stages] == ["specialised", "baseline"]
    found = plans.plan("single_user", None, "b200x8")
    assert [s.name for s in found.stages] == ["baseline"]
    assert "compute capability 10.0: the specialised decode, which needs 10.3" in found.notes[0]


@pytest.mark.parametrize(
    ("topic", "settings", "ranks"),
    [
        ("context_sweep", {"measured_draft_tokens": 0}, [1]),
        ("dp_imbalance", {}, [2, 1, 1]),
        ("expert_balance", {}, [1]),
        ("engine_gap", {}, [1]),
        ("single_node", {}, [1]),
    ],
)
def test_the_cpu_lab_is_planned_without_a_gpu_and_on_this_machine_only(topic, settings, ranks):
    found = plans.plan(topic, settings, "cpu-lab")
    servers = [process for stage in found.stages for process in stage.services]
    size = "--data-parallel-size"
    assert [int(value(p, size)) if size in p.arguments else 1 for p in servers] == ranks
    assert {value(process, "--host") for process in servers} == {"127.0.0.1"}
    assert (found.num_gpus, found.gpu_minutes) == (0, 0)
    for stage in found.stages:
        ports = [value(process, "--port") for process in stage.services]
        assert len(ports) == len(set(ports))


def test_the_lab_says_which_settings_it_replaces_and_keeps_those_that_ran():
    given = {
        "measured_input_tokens": [500],
        "requests_per_rank": 8,
        "measured_output_tokens": 32,
        "measured_repeats": 2,
    }
    found = plans.plan("single_node", given, "cpu-lab")
    (note,) = [note for note in found.notes if note.startswith("on the lab ")]
    assert "measured_input_tokens is [64] (given [500])" in note
    assert "requests_per_rank is [1, 2, 4] (given 8)" in note
    assert "measured_captures is not used (given [1536, 8192])" in note
    assert "measured_output_tokens" not in note  # the lab's own value
    assert {name: found.effective[name] for name in given} == {
        "measured_input_tokens": [64], "requests_per_rank": [1, 2, 4], "measured_output_tokens": 32,
        "measured_repeats": 2,
    }  # fmt: skip
    sent = [step[0] for step in found.stages[0].steps]
    assert {value(process, "--random-input-len") for process in sent} == {"64"}


def test_a_size_that_the_user_gave_is_not_called_the_source_s():
    found = plans.plan("engine_gap", {"measured_ep_sizes": [2]}, "cpu-lab")
    assert "measured_ep_sizes is [1] (given [2])" in found.notes[-1]
    assert not any("source" in note for note in found.notes)
    assert found.effective["measured_ep_sizes"] == [1]
    assert plans.plan("engine_gap", {}, "b300x8").effective["measured_ep_sizes"] == [8]
    assert plans.plan("single_node", {}, "b300x8").effective["measured_ranks"] == 8


def test_no_two_runs_of_a_client_share_a_seed():
    found = plans.plan("single_node", None, "b300x8")
    for stage in found.stages:
        seeds = [value(process, "--seed") for step in stage.steps for process in step]
        assert len(seeds) == len(set(seeds))
    assert [len(stage.steps) for stage in found.stages] == [3, 12]


def test_each_run_of_a_trace_has_prompts_of_its_own():
    settings = {"measured_concurrency": [8, 16], "measured_repeats": 2}
    clients = [step[0] for step in plans.plan("serving_pareto", settings, "gb300-nvl72").stages[0].steps]
    assert [value(process, "--max-concurrency") for process in clients] == ["8", "16", "8", "16"]
    assert [process.environment["PYTHONHASHSEED"] for process in clients] == ["0", "1", "2", "3"]
    assert [value(process, "--seed") for process in clients] == ["0", "1", "2", "3"]
    assert len({value(process, "--result-filename") for process in clients}) == 4
    absent = plans.plan("serving_pareto", {"workload_path": "none.jsonl"}, "gb300-nvl72")
    assert "none.jsonl is not there: 16 tokens per hash id are assumed" in absent.notes
    assert {process.environment["VLLM_ENGINE_READY_TIMEOUT_S"] for process in clients} == {"3600"}


@pytest.mark.parametrize(
    ("topic", "settings", "cluster", "words"),
    [
        ("wide_ep_scaling", {}, "cpu-lab", "found no GPU on cpu-lab; needed: GPUs for vllm bench forward"),
        ("context_sweep", {}, "cpu-lab", "found no drafter.*needed: one for 5 drafts.*Set measured_draft_tokens to 0"),
        ("context_sweep", {"measured_ranks": 16}, "b300x8", "found 8 GPUs on b300x8; needed: 16. Lower measured_ranks"),
        ("context_sweep", {"measured_ranks": 6}, "gb300-nvl72", "of 4 GPUs.*Set measured_ranks to a multiple of 4"),
        ("context_sweep", {"measured_ranks": 7}, "b300x8", "7 ranks; needed: a number that divides the 384 experts"),
        (
            "context_sweep",
            {"measured_contexts": [1_048_576]},
            "b300x8",
            "context ends at 1,048,576 tokens.*needed: 1,048,576 tokens and 6 more for drafts. Lower measured_contexts",
        ),
        ("wide_ep_scaling", {"measured_ep_sizes": [16]}, "b300x8", "found 8 GPUs.*needed: 16. Lower measured_ep_sizes"),
        ("prefill_ablation", {"measured_new_tokens": [1_000_000]}, "b300x8", "needed: 1,131,072 tokens. Lower"),
        ("single_node", {"measured_input_tokens": [32768]}, "b300x8", "max_model_len 16384.*33792.*Raise max_model"),
        ("expert_balance", {"ranks": 5}, "b300x8", "a number that divides the 389 experts"),
        ("decode_parity", {"measured_ranks": 9}, "b300x8", "9 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_stops_and_says_what_would(topic, settings, cluster, words):
    with pytest.raises(UnfitError, match=words):
        plans.plan(topic, settings, cluster)


def test_a_recipe_for_other_hardware_is_refused():
    with pytest.raises(
        UnfitError, match="found h200 on h200x8; needed: gb300 for deepseek-v4.1-flash-gb300. Name another"
    ):
        plans.plan("context_sweep", None, "h200x8", "deepseek-v4.1-flash-gb300")


def test_an_unknown_topic_and_a_wrong_setting_are_refused():
    with pytest.raises(DataError, match="unknown experiment that can measure: got 'cost'"):
        plans.plan("cost", None, "b300x8")
    with pytest.raises(ParameterError, match="measured_ranks: got 0, allowed"):
        plans.plan("context_sweep", {"measured_ranks": 0}, "b300x8")
    with pytest.raises(ParameterError, match="measured_fixes: unknown switch: got 'replays'.*Did you mean 'replay'"):
        plans.plan("prefill_ablation", {"measured_fixes": ["replays"]}, "b300x8")


def test_words_are_replaced_whole():
    process = Process("x", ("HOST_1", "http://HOST_1:8", "HOST_10", "RUN_FOLDER/a.json"), {"AT": "HOST_1"})
    stage = Stage("s", 1.0, "assumed", steps=((process,),))
    where = clusters.cluster("gb300-nvl72")
    plan = Plan("x", where, recipes.recipe(where.recipe), (stage,), plans.plan("context_sweep", None, where).needs)
    (changed,) = plan.replaced({"HOST_1": "tray1", "RUN_FOLDER": "/runs/a"}).processes
    assert changed.arguments == ("tray1", "http://tray1:8", "HOST_10", "/runs/a/a.json")
    assert changed.environment == {"AT": "tray1"}


def test_the_text_can_be_pasted_into_a_shell():
    found = plans.plan("context_sweep", None, "b300x8")
    text = found.text()
    assert text.startswith(
        "context_sweep on b300x8 (8×B300, 1 × 8 GPUs, local), recipe deepseek-v4.1-flash-b300\n8 GPUs"
    )
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "torch.distributed.run" in line)
    last = next(i for i in range(first, len(lines)) if not lines[i].endswith("\\"))
    pasted = shlex.split("\n".join(lines[first : last + 1]).replace("\\\n", " "))
    assert pasted == ["VLLM_ENGINE_READY_TIMEOUT_S=3600", *found.processes[0].arguments]
    for word in ("assumed", "needs vLLM 0.33.0", "#61339", "compute capability 10.3", "not its claim"):
        assert word in text


def test_a_run_keeps_the_plan_without_variables_that_may_be_private(trays):
    path = trays(extra='addresses = ["tray0", "tray1"]\n[environment]\nSITE_PASS = "honey-4711"')
    found = plans.plan("context_sweep", {"measured_ranks": 8}, path)
    assert found.text(whole=True).count("honey-4711") == 2  # here, and in the line for the other host's shell
    assert "honey-4711" not in found.text()
    assert "SITE_PASS='***'" in found.text()
    assert "VLLM_ENGINE_READY_TIMEOUT_S=3600" in found.text()
    second = found.processes[1]
    assert "honey-4711" in second.command[-1]
    assert not any("honey-4711" in word for word in second.words)
    assert second.words == ("ssh", "-tt", "-o", "BatchMode=yes", "tray1", *second.arguments)


def test_the_command_takes_parameters_of_the_notebook_and_of_the_measurement():
    found = planned("03", [("measured_ep_sizes", "4,8"), ("requests_per_gpu", "32")], "b300x8", None)
    assert [stage.name for stage in found.stages] == ["ep4", "ep8"]
    assert "step=32*6@131072:5" in found.processes[0].arguments
    with pytest.raises(ParameterError, match="unknown parameter of 03_wide_ep_scaling: got 'requests_per_gp'.*Did you"):
        planned("03", [("requests_per_gp", "32")], "b300x8", None)
    with pytest.raises(ParameterError, match="measured_ep_sizes.*got '4,x', allowed: a list"):
        planned("wide_ep_scaling", [("measured_ep_sizes", "4,x")], "b300x8", None)
    with pytest.raises(ParameterError, match="measured_samples.*got 'none'"):
        planned("03", [("measured_samples", "none")], "b300x8", None)
    with pytest.raises(ParameterError, match="twice"):
        planned("03", [("measured_samples", "3"), ("measured_samples", "4")], "b300x8", None)

"""Kernel profiles: both formats, what is refused, and how kernels become components."""

import csv
import json

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackbook.errors import DataError
from rackbook.importers.kernel_profiles import read_kernel_profiles
from rackbook.models import kernel_components
from rackbook.models.kernel_components import by_component, over_ranks, read_patterns, short_name, unassigned

NSIGHT = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
SUMMARY = {"trace": "t.gz", "replays": 3, "span_us": 900.0, "busy_us": 1000.5, "pre_forward_us": 2.5, "activities": 42}


def kernel(name, us, calls=1):
    return {"name": name, "us": us, "pct": 1.0, "calls": calls, "example": f"void {name}<int>(int)"}


def write(path, *kernels, **changes):
    path.write_text(json.dumps(SUMMARY | {"kernels": list(kernels)} | changes))
    return path


def read(path, *, forwards=1, stage=None):
    return read_kernel_profiles(path, stage=stage, hardware="H", model="M", nsight_forwards=forwards)


def test_a_summary_of_bench_forward(tmp_path):
    path = write(tmp_path / "c128k.rank3.kernels.json", kernel("nvjet", 250, 8), kernel("mega_moe_impl", 750.5, 40))
    profiles = read(path, forwards=7)
    (file,) = profiles.files.to_dicts()
    assert (file["profile_format"], file["rank"], file["num_forwards"]) == ("bench forward", 3, 3)
    assert (file["span_us"], file["busy_us"], file["kernel_sum_us"]) == (900, 1000.5, 1000.5), "busy exceeds the span"
    assert (file["num_kernels"], file["pre_forward_us"], file["origin"]) == (2, 2.5, "measured")
    assert profiles.kernels.select("kernel", "kernel_us", "calls_per_forward").rows() == [
        ("mega_moe_impl", 750.5, 40.0),
        ("nvjet", 250.0, 8.0),
    ], "longest first, and per forward pass as they are: nsight_forwards is not for them"


def test_a_report_of_nsight_is_divided_by_its_forward_passes(tmp_path):
    path = tmp_path / "report_cuda_gpu_kern_sum.csv"
    path.write_text(
        "Processing [run.sqlite] with [cuda_gpu_kern_sum.py]...\n\n"
        + NSIGHT
        + '60.0,6000,4,1.0,1.0,1,1,0.0,"void f<int, (bool)1>(T1, T2)"\n'
        + "30.0,3000,2,1.0,1.0,1,1,0.0,g\n10.0,1000,2,1.0,1.0,1,1,0.0,g\n"
    )
    profiles = read(path, forwards=2)
    assert profiles.kernels.select("kernel", "kernel_us", "calls_per_forward").rows() == [
        ("void f<int, (bool)1>(T1, T2)", 3.0, 2.0),
        ("g", 2.0, 2.0),
    ]
    (file,) = profiles.files.to_dicts()
    assert (file["profile_format"], file["rank"], file["kernel_sum_us"]) == ("Nsight", None, 5.0)
    assert file["span_us"] is None
    assert "no time line" in file["missing_reason"]


def test_all_ranks_of_a_case_are_found_and_sorted_by_number(tmp_path):
    for rank in (10, 2):
        write(tmp_path / f"a.rank{rank}.kernels.json", kernel("x", rank))
    assert read(tmp_path).files["rank"].to_list() == [2, 10]
    write(tmp_path / "b.b.rank0.kernels.json", kernel("x", 5))
    assert read(tmp_path / "b.b").kernels["kernel_us"].to_list() == [5]
    with pytest.raises(DataError, match="holds several cases: a, b.b; name one, e.g. .*a$"):
        read(tmp_path)
    with pytest.raises(DataError, match="no such profile, the folder holds the cases a, b.b; expected a file"):
        read(tmp_path / "c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither a .kernels.json file .* nor a cuda_gpu_kern_sum CSV"),
        ("{", "not valid JSON"),
        ("[{}]", "got a list, expected an object with span_us"),
        ('{"case": "c", "ranks": []}', "got keys case, ranks, expected an object"),
        (json.dumps(SUMMARY | {"kernels": []}), "field kernels: "),
        (json.dumps(SUMMARY | {"kernels": [kernel("a", 1), kernel("b", -1)]}), "field kernels.1.us: got -1"),
        (json.dumps(SUMMARY | {"kernels": [kernel("a", "1")]}), "field kernels.0.us: got '1'"),
        (json.dumps(SUMMARY | {"kernels": [kernel("a", float("nan"))]}), "field kernels.0.us: got nan"),
        (json.dumps(SUMMARY | {"kernels": [kernel("a", 0)]}), "no time at all"),
        (json.dumps({"kernels": [kernel("a", 1)]}), "field replays: got nothing.*field span_us: got nothing"),
        (NSIGHT, "has a header but no kernels"),
        (NSIGHT.replace("Total Time (ns)", "Total Time (ms)"), r"row 1: column 'Total Time \(ns\)' is missing"),
        (NSIGHT + "1,2,3,f\n", "row 2: got 4 cells, expected 9"),
        (NSIGHT + "1,1_0,3,1,1,1,1,1,f\n", r"row 2, column Total Time \(ns\): got '1_0', expected a number"),
        (NSIGHT + "1,10,3,1,1,1,1,1,f\n1,10,nan,1,1,1,1,1,g\n", "row 3, column Instances: got 'nan'"),
        (NSIGHT + "1,10,3,1,1,1,1,1,\n", "row 2, column Name: got nothing"),
        (NSIGHT + '1,10,3,1,1,1,1,1,"f<a, b\n', "row 2: not a readable CSV"),
    ],
)
def test_bad_files_are_refused_with_field_or_row(tmp_path, text, words):
    path = tmp_path / "p"
    path.write_text(text)
    with pytest.raises(DataError, match=f"p(,|:).*{words}"):
        read(path)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(b"\x00\xff\xfe")
    with pytest.raises(DataError, match="run.nsys-rep: not UTF-8 text"):
        read(path)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_sm100", "nvjet_sm100"),
        ("void ns::f<int, 4>(T1, T2)", "ns::f"),
        ("void cutlass::device_kernel<flash::Op<1, 2>, int>(T1::Params)", "cutlass::device_kernel<flash::Op>"),
        ("void cutlass::Kernel2<cutlass_80_gemm>(T1::Params)", "cutlass::Kernel2<cutlass_80_gemm>"),
        ("std::enable_if<!T7, void>::type internal::gemvx::kernel<int, float>(T13)", "internal::gemvx::kernel<int>"),
        ("void at::native::<unnamed>::Cat<T<(unsigned int)2>, (int)3>(char *)", "at::native::Cat"),
        ("void (anonymous namespace)::f<int>(T)", "f"),
        ("void f<g(T &)::[lambda(int) (instance 1)]>(int, T3)", "f"),
        ("void f<x->y, 3>(int)", "f"),
        ("a<b>::kernel(int)", "a::kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("void broken<a(", "void broken<a("),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short


@given(st.text("ab:<>()[], _-", max_size=30))
def test_a_short_name_is_its_own_short_name(name):
    assert short_name(short_name(name)) == short_name(name)


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("void deep_gemm::sm100_fp8_fp4_mega_moe_impl<1u, 2u>(void *)", "moe"),
        ("_dsv4_topk_kernel", "moe"),
        ("deep_gemm::sm100_mxfp4_paged_mqa_logits", "indexer"),
        ("_fused_kv_compress_norm_rope_insert_indexer_attn", "indexer"),
        ("hc_head_fuse_tilelang_kernel", "mhc"),
        ("mhc_pre_big_fuse_tilelang_kernel", "mhc"),
        ("hc_prenorm_gemm_tilelang_kernel", "mhc"),
        ("_engram_lookup_kernel", "engram"),
        ("flash_fwd_splitkv_mla_kernel", "attn_core"),
        ("_q_kv_norm_quant_kernel", "attn_prep"),
        ("kernel", "attn_prep"),
        ("ncclDevKernel_AllGather_RING_LL(T1)", "comm"),
        ("_prepare_dflash_inputs_kernel", "draft"),
        ("deep_gemm::sm100_fp8_fp4_gemm_1d1d_impl", "gemm"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(T1)", "gemm"),
        ("internal::gemvx::kernel<int>", "gemm"),
        ("Memset (Device)", "memory"),
        ("triton_red_fused_rms_norm_0", "unassigned"),
        ("at::native::sbtopk::gatherTopK", "unassigned"),
    ],
)
def test_the_first_pattern_that_is_found_wins(name, component):
    assert read_patterns().of(name) == component


def patterns_file(folder, text):
    path = folder / "patterns.toml"
    path.write_text(text)
    return path


def entry(name="a", pattern="a", part="rest", more=""):
    return f"[[component]]\nname = '{name}'\nmeaning = ''\npart = '{part}'\npattern = '{pattern}'\n{more}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "field component: got nothing"),
        (entry("good") + entry("bad", "a(b"), r"component 2 \(bad\): field pattern: got 'a\(b', .*not a regular expr"),
        (entry(pattern="a*"), r"component 1 \(a\): field pattern: .*found in every name"),
        (entry("unassigned"), r"component 1 \(unassigned\): field name: .*is the name of what no pattern finds"),
        (entry(part="attention"), r"component 1 \(a\): field part: got 'attention'"),
        (entry(more="patern = 'x'"), r"component 1 \(a\): field patern: unknown key.*Did you mean 'pattern'"),
        (entry() + entry(), r"component 2 \(a\): the name stands at component 1 already"),
        ("component = 3", "field component: got 3"),
    ],
)
def test_bad_patterns_are_refused_with_their_entry(tmp_path, text, words):
    with pytest.raises(DataError, match=f"patterns.toml: {words}"):
        read_patterns(patterns_file(tmp_path, text))


def times(*rows):
    columns = {"kernel": pl.String, "rank": pl.Int64, "kernel_us": pl.Float64, "calls_per_forward": pl.Float64}
    share = (100 * pl.col("kernel_us") / pl.col("kernel_us").sum().over("rank")).alias("recording_share_percent")
    return pl.DataFrame(rows, schema=columns, orient="row").with_columns(share)


def test_times_over_ranks_by_hand():
    kernels = times(
        ("f<int>(T)", 0, 4.0, 1.0), ("f<float>(T)", 0, 6.0, 1.0), ("f<int>(T)", 1, 30.0, 2.0), ("f", 2, 20.0, 2.0),
        ("g", 2, 9.0, 3.0),
    )  # fmt: skip
    by_statistic = {s: dict(over_ranks(kernels, s).select("kernel", "kernel_us").iter_rows()) for s in ("min", "max")}
    assert by_statistic["min"] == {"f": 10.0, "g": 0.0}, "g did not run on two ranks"
    assert by_statistic["max"] == {"f": 30.0, "g": 9.0}
    assert over_ranks(kernels, "median").rows() == [("f", 20.0, 2.0, 100.0), ("g", 0.0, 0.0, 0.0)]
    with pytest.raises(DataError, match="got 'mean', allowed: min, median, max"):
        over_ranks(kernels, "mean")


def test_a_report_without_ranks_counts_once():
    assert over_ranks(times(("f", None, 4.0, 1.0), ("g", None, 5.0, 2.0)), "min")["kernel_us"].to_list() == [5.0, 4.0]


def test_without_the_forward_passes_shares_are_all_that_is_known(tmp_path):
    path = tmp_path / "n.csv"
    path.write_text("Total Time (ns),Instances,Name\n1500,3,moe_a\n500,1,x\n2000,4,moe_a\n")
    profiles = read(path, forwards=None)
    (file,) = profiles.files.to_dicts()
    assert (file["num_forwards"], file["kernel_sum_us"], file["num_kernels"]) == (None, None, 2)
    assert "no time line" in file["missing_reason"]
    assert "forward passes of this Nsight recording are not given" in file["missing_reason"]
    columns = ("kernel", "kernel_us", "calls_per_forward", "recording_share_percent")
    assert profiles.kernels.select(columns).rows() == [("moe_a", None, None, 87.5), ("x", None, None, 12.5)]
    assert profiles.kernels["missing_reason"].null_count() == 0
    kernels = over_ranks(profiles.kernels, "median")
    assert kernels.rows() == [("moe_a", None, None, 87.5), ("x", None, None, 12.5)]
    patterns = read_patterns(patterns_file(tmp_path, entry("m", "moe", "moe") + entry("n", "never")))
    assert by_component(kernels, patterns).rows() == [
        ("m", "moe", None, 87.5, 1),
        ("n", "rest", None, 0.0, 0),
        ("unassigned", "unassigned", None, 12.5, 1),
    ]
    assert unassigned(kernels, patterns).rows() == [("x", None, 12.5, None)]


def test_components_by_hand_with_the_unassigned_always_last(tmp_path):
    patterns = read_patterns(patterns_file(tmp_path, entry("m", "moe", "moe") + entry("n", "never")))
    kernels = over_ranks(times(("moe_a", 0, 50.0, 1.0), ("moe_b", 0, 25.0, 1.0), ("x", 0, 25.0, 4.0)), "median")
    components = by_component(kernels, patterns)
    assert components.rows() == [
        ("m", "moe", 75.0, 75.0, 2),
        ("n", "rest", 0.0, 0.0, 0),
        ("unassigned", "unassigned", 25.0, 25.0, 1),
    ]
    assert unassigned(kernels, patterns).rows() == [("x", 25.0, 25.0, 4.0)]
    only = by_component(kernels.filter(pl.col("kernel") != "x"), patterns)
    assert only.row(-1) == ("unassigned", "unassigned", 0.0, 0.0, 0)


@given(st.lists(st.tuples(st.sampled_from(["moe", "nvjet", "x<y>(z)", "ncclRing"]), st.floats(0.01, 1e6)), min_size=1))
def test_no_time_is_lost_or_counted_twice(rows):
    kernels = times(*((name, 0, us, 1.0) for name, us in rows))
    components = by_component(over_ranks(kernels, "max"), read_patterns())
    assert components["kernel_us"].sum() == pytest.approx(sum(us for _, us in rows))
    assert components["step_share_percent"].sum() == pytest.approx(100)


def test_every_part_of_the_published_breakdown_has_components():
    found = {component.part for component in read_patterns().component}
    assert found == set(kernel_components.PARTS)


@pytest.mark.parametrize("name", ["all-stage_cuda_gpu_kern_sum.csv", "per-stage_decode_cuda_gpu_kern_sum.csv"])
def test_real_reports_of_another_model(realdata, name):
    path = realdata / "nsys" / name
    if not path.is_file():
        pytest.skip(f"no {name} at {path.parent}")
    profiles = read(path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert profiles.kernels["kernel_us"].sum() == pytest.approx(sum(int(row["Total Time (ns)"]) for row in rows) / 1e3)
    assert set(profiles.kernels["kernel"]) == {row["Name"] for row in rows}
    assert any(", " in kernel for kernel in profiles.kernels["kernel"])
    shares = dict(
        by_component(over_ranks(profiles.kernels, "median"), read_patterns())
        .select("component", "step_share_percent")
        .iter_rows()
    )
    assert shares["gemm"] > 50
    assert shares["gemm"] + shares["unassigned"] == pytest.approx(100), "nothing of this model's own is found in it"

"""Prometheus text: reading, growth between two readings, and prefix-cache hits."""

import http.server
import threading

import pytest

from rackbook.engine import metrics
from rackbook.engine.metrics import Snapshot
from rackbook.errors import DataError

TEXT = """# HELP vllm:prefix_cache_queries_total Queries
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.0e+02
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 50
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 20
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{engine="0",le="0.1"} 1
vllm:ttft_seconds_bucket{engine="0",le="+Inf"} 2
vllm:ttft_seconds_sum{engine="0"} 0.5
vllm:ttft_seconds_count{engine="0"} 2
"""


def test_series_are_read_and_created_twins_left_out():
    found = Snapshot.parse(TEXT)
    assert found.total("vllm:prefix_cache_queries_total") == 150
    assert found.total("vllm:prefix_cache_queries_total", engine="1") == 50
    assert found.by_label("vllm:prefix_cache_hits_total", "engine") == {"0": 20, "1": 0}
    assert not any(name.endswith("_created") for name in found.names())


def test_label_values_with_quotes_commas_and_braces():
    found = Snapshot.parse('a{x="1, \\"2\\"}",y="b\\\\c"} 4 1700000000\n')
    assert found.by_label("a", "x") == {'1, "2"}': 4}
    assert found.by_label("a", "y") == {"b\\c": 4}


def test_growth_is_of_counters_only_and_a_new_series_began_at_zero():
    later = TEXT.replace("1.0e+02", "180").replace("} 3", "} 1").replace('count{engine="0"} 2', 'count{engine="0"} 5')
    later += 'vllm:prefix_cache_hits_total{engine="2",model_name="m"} 7\n'
    grown = metrics.growth(Snapshot.parse(TEXT), Snapshot.parse(later))
    assert grown.total("vllm:prefix_cache_queries_total") == 80
    assert grown.total("vllm:ttft_seconds_count") == 3
    assert grown.total("vllm:prefix_cache_hits_total", engine="2") == 7
    with pytest.raises(DataError, match="unknown metric"):
        grown.total("vllm:num_requests_running")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("1.0e+02", "99"), r"engine=0,model_name=m}: fell from 100 to 99 .*restarted"),
        (lambda text: text.replace('vllm:prefix_cache_hits_total{engine="1",model_name="m"} 0\n', ""), "vanished"),
    ],
)
def test_a_counter_that_falls_or_vanishes_means_a_restart(change, words):
    with pytest.raises(DataError, match=words):
        metrics.growth(Snapshot.parse(TEXT), Snapshot.parse(change(TEXT)))


def test_prefix_hits_by_engine_and_in_all():
    grown = metrics.growth(Snapshot.parse("a 1\n"), Snapshot.parse(TEXT))
    frame = metrics.prefix_hits(grown)
    assert frame["rank"].to_list() == [0, 1]
    assert frame["prefix_hit_percent"].to_list() == [20.0, 0.0]
    assert metrics.prefix_hit_percent(grown) == pytest.approx(100 * 20 / 150)


def test_without_lookups_there_is_no_hit_rate():
    assert metrics.prefix_hit_percent(metrics.growth(Snapshot.parse(TEXT), Snapshot.parse(TEXT))) is None
    assert metrics.prefix_hit_percent(metrics.growth(Snapshot.parse("a 1\n"), Snapshot.parse("a 1\n"))) is None


def test_a_real_dump(realdata):
    text = (realdata / "inferencex/mtp_fixed_ar/livecodebench_metrics.txt").read_text("utf-8")
    found = Snapshot.parse(text)
    assert found.total("vllm:spec_decode_num_drafts_total") == 43680
    assert found.total("vllm:spec_decode_num_draft_tokens_total") == 3 * 43680
    assert found.total("process_virtual_memory_bytes") == 3.09395161088e11


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no metric in 0 characters"),
        ("<html>\n", "line 1: not a sample: got '<html>'"),
        ("a 1\nb{x=1} 2\n", "line 2: labels of an unknown form"),
        ("a one\n", "line 1: could not convert"),
    ],
)
def test_what_is_no_metrics_text_is_named(text, words):
    with pytest.raises(DataError, match=words):
        Snapshot.parse(text)


def test_fetching_from_a_server_and_from_none(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for a server of one's own
    monkeypatch.delenv("no_proxy", raising=False)

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(TEXT.encode())

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert metrics.fetch(f"{address}/").total("vllm:prefix_cache_hits_total") == 20
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(DataError, match="no metrics: .*is the server running"):
        metrics.fetch(address, timeout_s=1)
    with pytest.raises(DataError, match="got the server address 'file:///etc'"):
        metrics.fetch("file:///etc")

"""Stands in for a Python that has vLLM where a plan serves: the server, its log and its counters, and the client.

Started as the real one is, ``-m vllm.entrypoints.cli.main serve …`` and ``… bench serve …``; ``bench forward`` is left
to ``fake_vllm.py``. Every number is made by hand: a step of :data:`STEP_MS`, a token of :data:`TPOT_MS`.
"""

import http.server
import json
import os
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

STEP_MS, TPOT_MS, ACCEPTANCE_LENGTH = 10.0, 4.0, 3.5


def option(words: list[str], flag: str, default: str = "") -> str:
    return words[words.index(flag) + 1] if flag in words else default


def iteration(number: int, requests: int, step_ms: float = STEP_MS) -> str:
    return (
        f"(APIServer pid=1) INFO 11-29 19:31:05 [loggers.py:199] Engine 000: Iteration({number}): 0 context requests, "
        f"0 context tokens, {requests} generation requests, {requests} generation tokens, "
        f"iteration elapsed time: {step_ms:.2f} ms, CPU KV cache usage: 1.0%"
    )


class Handler(http.server.BaseHTTPRequestHandler):
    looked_up = 0
    iterations = 0

    def log_message(self, *arguments):
        pass

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.answer(
            {
                "/health": "",
                "/v1/models": json.dumps({"data": [{"id": "served"}]}),
                "/metrics": "# TYPE vllm:prefix_cache_queries_total counter\n"
                f'vllm:prefix_cache_queries_total{{engine="0"}} {Handler.looked_up}\n'
                "# TYPE vllm:prefix_cache_hits_total counter\n"
                'vllm:prefix_cache_hits_total{engine="0"} 0\n',
            }[self.path]
        )

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("die"):
            os._exit(3)
        Handler.looked_up += 1000
        for _ in range(asked["steps"]):
            print(iteration(Handler.iterations, asked["requests"]), flush=True)
            Handler.iterations += 1
        self.answer("{}")


def serve(words: list[str]) -> None:
    print("serving", flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", int(option(words, "--port"))), Handler).serve_forever()


def client(words: list[str]) -> None:
    seed, sent = int(option(words, "--seed", "0")), int(option(words, "--num-prompts"))
    concurrency, output = int(option(words, "--max-concurrency")), int(option(words, "--random-output-len", "10"))
    die = os.environ.get("FAKE_SERVER") == "dies" and seed == 1
    body = json.dumps({"requests": concurrency, "steps": 5, "die": die}).encode()
    urllib.request.urlopen(urllib.request.Request(option(words, "--base-url"), data=body))
    tpot = TPOT_MS + 0.1 * (seed % 3)
    latencies = {"ttft": 50.0, "tpot": tpot, "itl": tpot, "e2el": 100.0}
    content = {
        "num_prompts": sent,
        "completed": sent,
        "failed": 0,
        "duration": 2.0,
        "max_concurrency": concurrency,
        "total_input_tokens": sent * int(option(words, "--random-input-len", "100")),
        "total_output_tokens": sent * output,
        "output_throughput": 100.0 + seed,
        "total_token_throughput": 200.0 + seed,
        "request_rate": "inf",
        "spec_decode_acceptance_length": ACCEPTANCE_LENGTH,
    }
    for name, value in latencies.items():
        content |= {f"{statistic}_{name}_ms": value for statistic in ("mean", "median", "p50", "p90", "p99")}
        content[f"std_{name}_ms"] = 0.0
    folder = Path(option(words, "--result-dir"))
    (folder / option(words, "--result-filename")).write_text(json.dumps(content))


def main() -> None:
    words = sys.argv[1:]
    if "serve" in words and "bench" in words:
        client(words)
    elif "serve" in words:
        serve(words)
    else:
        import fake_vllm

        fake_vllm.main()


if __name__ == "__main__":
    main()

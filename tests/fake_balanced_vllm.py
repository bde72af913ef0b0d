"""Stands in for a Python that has vLLM on several hosts: a server that logs EPLB's balance and returns routed experts.

Started as the real one is; a headless process only lives, and the client is that of ``fake_vllm_server.py``. Asked for
a tokenizer's size, it says :data:`VOCABULARY`.
"""

import base64
import http.server
import io
import json
import sys
import time

import numpy as np

import fake_vllm_server
from fake_vllm_server import option

VOCABULARY = 100_000
BALANCE = (
    "INFO 11-29 20:04:21 [eplb_state.py:632] EPLB step: 10 for model m: avg_tokens=12.00, max_tokens=24, "
    "balancedness=0.5000, steps until the next rearrangement: 90"
)
LAYERS, TOP_K = 2, 6


class Handler(fake_vllm_server.Handler):
    def do_POST(self):  # noqa: N802
        if self.path != "/v1/completions":
            super().do_POST()
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(f"prompt of {len(asked['prompt'])} tokens, the largest {max(asked['prompt'])}", flush=True)
        choice = {"text": ""}
        if "--enable-return-routed-experts" in sys.argv:
            buffer = io.BytesIO()
            tokens = len(asked["prompt"]) + asked["max_tokens"] - 1
            np.save(buffer, np.broadcast_to(np.arange(TOP_K, dtype=np.int16), (tokens, LAYERS, TOP_K)))
            choice["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        self.answer(json.dumps({"choices": [choice], "usage": usage}))


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "-c" and "AutoTokenizer" in words[1]:
        print(VOCABULARY)
    elif "--headless" in words:
        time.sleep(600)
    elif "serve" in words and "bench" not in words:
        print(BALANCE, flush=True)
        place = (option(words, "--host"), int(option(words, "--port")))
        http.server.ThreadingHTTPServer(place, Handler).serve_forever()
    else:
        fake_vllm_server.main()


if __name__ == "__main__":
    main()

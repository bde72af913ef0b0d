"""Stands for vLLM where only its processes matter: answers like it, and has children that do not want to end.

Arguments: port, then any of: `stubborn` (a grandchild in a session of its own that ignores SIGTERM), `env=NAME` (writes
that variable to its output), `die` (ends with a traceback before it answers), `mute` (never answers).
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import time

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork() and os._exit(0); os.setsid(); time.sleep(600)"  # noqa: E501


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content = json.dumps({"data": [{"id": "fake"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


port, *wishes = sys.argv[1:]
print("starting", flush=True)
for wish in wishes:
    if wish.startswith("env="):
        print(f"{wish[4:]} is {os.environ[wish[4:]]}", flush=True)
if "die" in wishes:
    raise RuntimeError("the weights are made of cheese")
if "mute" in wishes:
    time.sleep(600)
children = [subprocess.Popen([sys.executable, "-c", SLEEP])]
if "stubborn" in wishes:
    children.append(subprocess.Popen([sys.executable, "-c", STUBBORN]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Answers).serve_forever()

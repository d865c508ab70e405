"""A small real server for tests of what all server engines share. Run as a script; `--mode` says how it misbehaves.

It spawns a child of its own that ignores SIGTERM, as engines do, so that tests can see whether anything is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    weights = "none"
    aborted: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        if self.path.startswith("/tqppo/"):
            return self.answer({"error": "no such route"}, 404)
        self.answer({"model": self.server.options.served, "weights": Handler.weights, "pid": os.getpid()})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        mode = self.server.options.mode
        if self.path == "/load":
            if mode == "die-in-push" and Handler.first_life():
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "refuse-push" and Handler.first_life():
                return self.answer({"error": "no such tensor"}, 500)
        elif self.path == "/label":
            Handler.weights = "stale" if mode == "forget" else body["version"]
        elif self.path == "/abort":
            Handler.aborted.add(body["id"])
        elif "poison" in body:
            os.kill(os.getpid(), signal.SIGKILL)
        elif body.get("slow"):
            Handler.sleep(body["slow"], body["id"])
        aborted = body.get("id") in Handler.aborted
        self.answer({"seed": body.get("seed", 0), "weights": Handler.weights, "pid": os.getpid(), "aborted": aborted})

    @staticmethod
    def sleep(seconds: float, request_id: str) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and request_id not in Handler.aborted:
            time.sleep(0.01)

    @staticmethod
    def first_life() -> bool:
        """True once per test folder."""
        marker = os.environ["LIVES"] + "/first"
        if os.path.exists(marker):
            return False
        open(marker, "w").close()
        return True

    def answer(self, content: object, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


class SmallServer(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True
    options: argparse.Namespace


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--host", "--served", "--mode"):
        parser.add_argument(name, default="")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.mode == "die-at-start":
        sys.exit("the model is not to my liking")
    subprocess.Popen([sys.executable, "-c", STUBBORN])
    if options.mode == "never-healthy":
        time.sleep(600)
    server = SmallServer((options.host, options.port), Handler)
    server.options = options
    print("listening", flush=True)
    name = f"/dev/shm/psm_small_{os.getpid()}" if options.mode == "shared" else os.devnull
    with open(name, "w"):  # held open, as engines hold theirs
        server.serve_forever()


if __name__ == "__main__":
    main()

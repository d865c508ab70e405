"""Starts SGLang with the token of the environment: every user of a machine can read the command lines of processes."""

import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv.append(f"--api-key={os.environ.pop('TQPPO_SERVER_TOKEN')}")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)

"""Ray's killer of processes on a node that runs out of memory: its message in words that say what to lower."""

from __future__ import annotations

import re

from tqppo.errors import OutOfMemory

# Of any process that dies, Ray says that the kernel's OOM killer may be the cause; these words are of its own killer.
SIGN = re.compile(r"killed due to the node running low on memory")
NODE = re.compile(r"Memory on the node \(IP: ([^,]+), ID: (\w+)\) was ([\d.]+ ?\w+) used / ([\d.]+ ?\w+) limit")
KILLED = re.compile(r"Selected to kill: \(.*?pid=(\d+), actual memory used=([\d.]+ ?\w+)")
USERS = re.compile(r"Top 10 memory users:[^\n]*\n((?:\d+\t[\d.]+\t[^\n]*\n?){1,3})")
LOWER = (
    "To need less memory on a node, lower storage.budget_gb, rollout.replicas, rollout.max_running, "
    "rollout.prefix_cache_gb, actor.micro_batch_tokens or the ranks of a role; or end other programs on it"
)


def out_of_memory(error: BaseException, what: str) -> OutOfMemory | None:
    """The error to raise instead, if Ray ended the process because its node ran out of memory."""
    text = str(error)
    if not SIGN.search(text):
        return None
    killed, node, users = KILLED.findall(text), NODE.search(text), USERS.search(text)
    named = "; ".join(f"{pid}, which used {used}" for pid, used in killed)
    whom = f"{len(killed)} processes ({named})" if len(killed) > 1 else "the process"
    own = f" (process {named})" if len(killed) == 1 else ""
    figures = f": node {node[2][:16]} at {node[1]} has {node[3]} of {node[4]} in use" if node else ""
    largest = "".join(f"\n  process {line}" for line in users[1].strip().split("\n")) if users else ""
    shown = f"\nThe largest processes there, with their GB:{largest}" if largest else ""
    why = f"Ray ended {whom}{own} because its node ran out of memory{figures}"
    return OutOfMemory(f"{what}: {why}.{shown}\n{LOWER}")

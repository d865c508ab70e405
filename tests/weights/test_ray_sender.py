"""A sender of weights that is a Ray actor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tqppo.errors import EngineError
from tqppo.processes.nodes import this_node
from tqppo.weights.ray_sender import RaySenderClient, start_sender, stop_sender


@pytest.mark.usefixtures("local_ray")
def test_a_sender_in_another_process_sends_files_and_names_what_failed(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"12345")
    sender = start_sender(this_node(), 1)
    client = RaySenderClient(sender)
    assert asyncio.run(client.files(str(tmp_path))) == {"weights": 5}
    assert asyncio.run(client.read(str(tmp_path), "weights", 1, 3)).tobytes() == b"234"
    with pytest.raises(EngineError, match="failed to files: FileNotFoundError"):
        asyncio.run(client.files(str(tmp_path / "nowhere")))
    stop_sender(sender)
    stop_sender(sender)

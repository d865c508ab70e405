from __future__ import annotations

from typing import Any

import pytest

from tqppo.errors import DataLost, QueueError
from tqppo.queue.connection import Connection
from tqppo.queue.index.index import Index
from tqppo.queue.link.calls import Unresponsive, run
from tqppo.queue.link.ray_link import RayLink
from tqppo.queue.storage import StorageSpec

SPEC = StorageSpec("connectiontest", 1 << 20, token="secret")


class LostIndex(RayLink):
    """The link to an index that is gone."""

    def __init__(self, error: QueueError) -> None:
        super().__init__("namespace", "node-7", SPEC)
        self.error = error

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        raise self.error


@pytest.mark.parametrize("kind", [DataLost, Unresponsive])
def test_the_loss_of_the_index_names_its_node_and_the_rows_that_it_was_asked_about(kind: type[QueueError]) -> None:
    connection = Connection("simple", SPEC, LostIndex(kind("the queue's index is gone")))
    expected = (
        r"^the queue's index is gone. It ran on node node-7, and was asked about rows 'a', 'b' of partition 'train'$"
    )
    with pytest.raises(kind, match=expected):
        run(connection.call(Index.locate)("train", ("a", "b"), ["reward"]))
    with pytest.raises(kind, match=r"It ran on node node-7$"):
        run(connection.call(Index.stats)())


def test_other_errors_of_the_index_stay_as_they_are() -> None:
    connection = Connection("simple", SPEC, LostIndex(QueueError("no such rows: 'a'")))
    with pytest.raises(QueueError, match=r"^no such rows: 'a'$"):
        run(connection.call(Index.locate)("train", ("a",), ["reward"]))

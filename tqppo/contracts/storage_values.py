"""The storage contract for values: every value comes back exactly, and one that does not fit is refused."""

from __future__ import annotations

import pytest
import torch

from tqppo.contracts.storage_rows import check_ragged, keys, numbers
from tqppo.errors import QueueError
from tqppo.queue.client import BatchMeta, Jagged, Queue
from tqppo.queue.meta import ColumnData, Json

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
LENGTHS = ([3, 3, 3], [1], [5, 2], [0, 4, 0], [0], [0, 0])


# -- what goes in comes out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_exactly(queue: Queue, dtype: str) -> None:
    rows = [numbers(n, dtype=dtype, seed=n) for n in (4, 0, 7)]
    wide = [numbers(n, 2, 3, dtype=dtype, seed=n) for n in (1, 5, 0)]
    image = numbers(3, 2, 5, 4, dtype=dtype)
    batch = queue.put(keys(3), {"check_tokens": rows, "check_wide": wide, "check_image": image})
    found = queue.get(batch, ["check_image", "check_wide", "check_tokens"])
    check_ragged(found["check_tokens"], rows, dtype)
    check_ragged(found["check_wide"], wide, dtype)
    assert torch.equal(found["check_image"], image)
    assert list(found) == ["check_image", "check_wide", "check_tokens"]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_ragged_columns_are_jagged_whatever_their_lengths(queue: Queue, lengths: list[int]) -> None:
    rows = [numbers(n, dtype="int64", seed=n) for n in lengths]
    turned = [numbers(3, n, dtype="int64", seed=n) for n in lengths]
    names = keys(len(lengths))
    batch = queue.put(names, {"check_tokens": Jagged(torch.cat(rows), lengths), "check_positions": turned})
    for order in (list(range(len(names))), list(reversed(range(len(names))))):
        found = queue.get(batch.take(order), ["check_tokens", "check_positions"])
        check_ragged(found["check_tokens"], [rows[i] for i in order], "int64")
        check_ragged(found["check_positions"], [turned[i] for i in order], "int64")


def test_nested_tensors_go_in_as_they_are(queue: Queue) -> None:
    rows = [numbers(n, dtype="float32", seed=n) for n in (2, 6, 1)]
    whole = torch.nested.nested_tensor(rows, layout=torch.jagged)
    narrowed = torch.nested.narrow(torch.arange(12).view(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 2]),
                                   layout=torch.jagged)  # fmt: skip
    batch = queue.put(keys(3), {"check_tokens": whole})
    check_ragged(queue.get(batch, ["check_tokens"])["check_tokens"], rows, "float32")
    queue.put(batch, {"check_tokens": narrowed})
    check_ragged(queue.get(batch, ["check_tokens"])["check_tokens"], list(narrowed.unbind()), "int64")


def test_rows_of_many_puts_and_scattered_rows_are_gathered_in_the_order_asked(queue: Queue) -> None:
    rows = {key: numbers(20 * i % 57, dtype="int32", seed=i) for i, key in enumerate(keys(40))}
    order = [f"row{(i * 17) % 40}_0_0" for i in range(40)]
    for start in range(0, 40, 5):
        part = list(rows)[start : start + 5]
        numbered = torch.tensor([float(i) for i in range(start, start + 5)])
        values = {"check_tokens": [rows[key] for key in part], "check_number": numbered, "check_json": part}
        queue.put(part, values)
    for wanted in (order, order[:13], order[:1]):
        found = queue.get(BatchMeta("train", tuple(wanted)), ["check_tokens", "check_number", "check_json"])
        check_ragged(found["check_tokens"], [rows[key] for key in wanted], "int32")
        assert found["check_number"].tolist() == [float(list(rows).index(key)) for key in wanted]
        assert found["check_json"] == wanted


def test_json_holds_small_data_of_any_shape(queue: Queue) -> None:
    values: list[Json] = [{"a": [1, 2.5, None]}, "zażółć", [], None, {"nested": {"deep": True}}]
    batch = queue.put(keys(5), {"check_json": values})
    assert queue.get(batch, ["check_json"])["check_json"] == values


def test_large_tensors_come_back_exactly(queue: Queue) -> None:
    image = torch.randn(6, 3, 512, 512)  # 18 MiB
    batch = queue.put(keys(6), {"check_image": image})
    assert torch.equal(queue.get(batch, ["check_image"])["check_image"], image)
    scattered = [4, 0, 5]
    assert torch.equal(queue.get(batch.take(scattered), ["check_image"])["check_image"], image[scattered])


def test_rows_of_very_many_puts_come_back_together(queue: Queue) -> None:
    rows = [numbers(35_000, dtype="int64", seed=i) for i in range(100)]  # 280 kB each
    for i, row in enumerate(rows):
        queue.put([f"row{i}_0_0"], {"check_tokens": [row], "check_number": torch.tensor([float(i)])})
    order = [(i * 37) % 100 for i in range(100)]
    batch = BatchMeta("train", tuple(f"row{i}_0_0" for i in order))
    found = queue.get(batch, ["check_tokens", "check_number"])
    check_ragged(found["check_tokens"], [rows[i] for i in order], "int64")
    assert found["check_number"].tolist() == order


def test_no_rows_give_empty_columns(queue: Queue) -> None:
    found = queue.get(BatchMeta("train", ()), ["check_positions", "check_number", "check_json"])
    assert found["check_positions"].layout is torch.jagged
    assert len(found["check_number"]) == 0
    assert found["check_json"] == []


def test_a_column_put_again_replaces_the_first(queue: Queue) -> None:
    batch = queue.put(keys(3), {"check_number": torch.tensor([1.0, 2.0, 3.0]), "check_json": [1, 2, 3]})
    queue.put(batch.take([1]), {"check_number": torch.tensor([9.0])})
    found = queue.get(batch, ["check_number", "check_json"])
    assert found["check_number"].tolist() == [1.0, 9.0, 3.0]
    assert found["check_json"] == [1, 2, 3]


def test_results_may_be_changed_and_outlive_their_rows(queue: Queue) -> None:
    first = torch.randn(4, 3, 128, 128)
    batch = queue.put(keys(4), {"check_image": first})
    mine = queue.get(batch, ["check_image"])["check_image"]
    other = queue.get(batch, ["check_image"])["check_image"]
    mine += 1
    assert torch.equal(other, first)
    queue.clear(batch)
    for i in range(3):  # would be written over the same memory
        queue.clear(queue.put(keys(4), {"check_image": torch.full_like(first, i)}))
    assert torch.equal(mine, first + 1)
    assert torch.equal(other, first)


# -- strictness ------------------------------------------------------------------------------------------------------


def test_unknown_keys_and_columns_are_named(queue: Queue) -> None:
    batch = queue.put(keys(3), {"check_number": torch.zeros(3)})
    with pytest.raises(QueueError, match="unknown"):
        queue.get(BatchMeta("train", (*batch.keys, "unknown")), ["check_number"])
    with pytest.raises(QueueError, match="check_json"):
        queue.get(batch, ["check_number", "check_json"])
    with pytest.raises(QueueError, match="unknown"):
        queue.clear(BatchMeta("train", (*batch.keys, "unknown")))
    with pytest.raises(QueueError, match="elsewhere"):
        queue.get(BatchMeta("elsewhere", batch.keys), ["check_number"])
    assert len(queue.list()) == 3


def test_a_column_missing_on_one_row_is_an_error_that_names_both(queue: Queue) -> None:
    batch = queue.put(keys(3), {"check_number": torch.zeros(3)})
    queue.put(batch.take([0, 2]), {"check_json": [1, 2]})
    with pytest.raises(QueueError, match=r"check_json.*row1_0_0"):
        queue.get(batch, ["check_json"])


@pytest.mark.parametrize(
    "columns",
    [
        {"check_number": torch.zeros(2)},
        {"check_tokens": Jagged(torch.zeros(5), [1, 2, 3])},
        {"check_positions": [torch.zeros(3, 2)] * 3},
        {"check_undeclared": torch.zeros(3)},
        {"check_json": [object()] * 3},
        {"check_tokens": torch.zeros(3, 4)},
        {},
    ],
)
def test_a_refused_put_leaves_nothing_behind(queue: Queue, columns: dict[str, ColumnData]) -> None:
    with pytest.raises(QueueError):
        queue.put(keys(3), columns)
    assert len(queue.list()) == 0

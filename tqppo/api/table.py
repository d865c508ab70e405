"""The metrics of a run as a table: rows by step, columns by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqppo.metrics.files import Line

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class MetricsTable:
    """`len(table)`, iteration over rows, `table["actor/lr"]` as a list, `table.to_pandas()`."""

    rows: Sequence[Line]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> list[float | None]:
        """A column; None where a step has no such metric. KeyError if no step has it."""
        if name not in self.columns:
            raise KeyError(f"no step has the metric {name!r}; `columns` has their names")
        return [row.get(name) for row in self.rows]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def to_pandas(self) -> DataFrame:
        import pandas

        return pandas.DataFrame(list(self.rows)).set_index("step")

    def _repr_html_(self) -> str:
        """The last rows and main columns, as a notebook shows them."""
        names = [name for name in self.columns if name == "step" or name.endswith(("score/mean", "@1", "greedy"))]
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in names)}</tr>" for row in self.rows[-10:])
        return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: float | None) -> str:
    return f"<td>{'' if value is None else f'{value:.4g}'}</td>"

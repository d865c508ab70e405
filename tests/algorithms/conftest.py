"""The figures of verl 0.9.1 as test cases: `@pytest.mark.oracle(prefix, …)` runs a test on every case so named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

DATA = Path(__file__).parents[1] / "oracle"


@dataclass(frozen=True)
class Case:
    """One call of verl: padded [B, T] arrays in and out."""

    name: str
    params: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    error: str

    def flat(self, name: str) -> Tensor:
        """An input [B, T] in the flat layout, all T tokens of a row; the mask says which count."""
        return torch.from_numpy(self.inputs[name]).reshape(-1)

    def mask(self, name: str = "response_mask") -> Tensor:
        return self.flat(name).bool()

    def lengths(self, name: str = "response_mask") -> Tensor:
        rows, width = self.inputs[name].shape
        return torch.full((rows,), width)

    def result(self, name: str) -> Tensor:
        return torch.from_numpy(np.asarray(self.outputs[name])).reshape(-1)

    def close(self, found: Tensor, name: str, *, where: Tensor | None = None, atol: float = 1e-6) -> None:
        """Compare with verl's output, on the tokens of `where`."""
        expected, found = self.result(name), found.detach().reshape(-1)
        if where is not None:
            expected, found = expected[where], found[where]
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=atol)


@cache
def _index() -> dict[str, Any]:
    return json.loads((DATA / "verl.json").read_text())["cases"]


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(DATA / "verl.npz") as arrays:
        return dict(arrays)


def case_names(*prefixes: str) -> list[str]:
    return [name for name in _index() if name.startswith(prefixes)]


def load_case(name: str) -> Case:
    entry, arrays = _index()[name], _arrays()
    inputs, outputs = ({key: arrays[digest] for key, digest in entry[side].items()} for side in ("in", "out"))
    return Case(name, entry["params"], inputs, outputs, entry.get("error", ""))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "oracle(*prefixes): run on every figure of verl whose name starts so")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("oracle")
    if marker is not None:
        names = case_names(*marker.args)
        assert names, f"no oracle case starts with {marker.args}"
        metafunc.parametrize("case", [load_case(name) for name in names], ids=names)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def every_case() -> list[str]:
    return case_names("")

"""Sizes as text."""

from __future__ import annotations

from tqppo.units import GIB, size


def test_a_size_has_the_largest_fitting_unit() -> None:
    assert [size(each) for each in (12, 2048, 3 << 20, 5 * GIB)] == ["12 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
    assert size(2048 * GIB) == "2048 GiB"


def test_a_size_of_three_digits_has_no_fraction() -> None:
    assert [size(99.9 * GIB), size(113.4 * GIB), size(150 << 20)] == ["99.9 GiB", "113 GiB", "150 MiB"]

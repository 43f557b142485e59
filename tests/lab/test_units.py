"""Figures as people read them, up to where a unit gives way to the next."""

import pytest

from tilestack.lab.units import in_bytes, microseconds


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (99_950, "100 kB"), (999_600, "1,000 kB"), (1e6, "1 MB"), (1.5e15, "1,500 TB")],
)  # fmt: skip
def test_bytes_have_three_digits_and_no_exponent(size, shown):
    assert in_bytes(size) == shown


@pytest.mark.parametrize(
    ("time", "shown"),
    [(9.96, "10.0 µs"), (9999, "9999 µs"), (1e4, "10 ms"), (123_400, "123 ms"), (999_600, "1,000 ms"), (2.5e6, "2.5 s")],
)  # fmt: skip
def test_so_have_times(time, shown):
    assert microseconds(time) == shown

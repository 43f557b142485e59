"""The model of warps, counted by hand: what 32 lanes ask for, in sectors of 32 bytes."""

import numpy as np
import pytest

from tilestack.lab.tiles.sectors import sectors_of

BASE = 1 << 20


def tile(*offsets):
    """Addresses of elements, by their distance from an aligned place in bytes."""
    return (BASE + sum(np.asarray(each) for each in offsets)).astype(np.uint64)


def line(count, stride):
    return np.arange(count) * stride


@pytest.mark.parametrize(
    ("itemsize", "addresses", "touched", "fewest"),
    [
        (4, tile(line(256, 4)), 32, 32),  # a lane takes four: two requests of 512 bytes
        (4, tile(line(32, 8)), 8, 4),  # every second
        (4, tile(line(64, 4096)), 64, 8),  # down a column, a sector each
        (4, tile(line(64, 4), 4), 10, 8),  # an element late: two requests of 128 bytes that end in a fifth sector
        (4, tile(np.zeros(64, int)), 2, 2),  # one number for all, asked for by two warps
        (2, tile(line(32, 2)), 2, 2),  # the picture in docs/memory.md: side by side,
        (2, tile(line(32, 4)), 4, 2),  # every second,
        (2, tile(line(32, 32)), 32, 2),  # every 16th
        (1, tile(line(512, 1)), 16, 16),
        (8, tile(line(64, 8)), 16, 16),
        (4, tile(line(8, 1024)[:, None], line(8, 4)), 8, 8),  # eight rows of a sector
        (4, tile(line(8, 1024), line(8, 4)[:, None]), 8, 8),  # the same transposed: lanes go along memory
        (
            4,
            tile(line(4, 132)[:, None], line(32, 4)),
            19,
            16,
        ),  # rows of 33, all but their ends: three begin in a sector
    ],
)
def test_sectors_are_those_counted_by_hand(itemsize, addresses, touched, fewest):
    assert sectors_of(addresses, np.ones(addresses.shape, bool), itemsize) == (touched, fewest)


def test_lanes_that_are_off_ask_for_nothing():
    addresses = tile(line(64, 4))
    assert sectors_of(addresses, np.arange(64) < 9, 4) == (2, 2)
    assert sectors_of(addresses, np.zeros(64, bool), 4) == (0, 0)


def test_a_mask_within_a_vector_makes_a_lane_take_one_element():
    # One in 32 is wanted: each by a request of its own, where lanes that took four would ask for all of them in one.
    assert sectors_of(tile(line(128, 4)), np.arange(128) % 32 == 0, 4) == (4, 4)
    assert sectors_of(tile(line(128, 4)), np.arange(128) % 32 < 4, 4) == (4, 2)


def test_what_a_descriptor_moves_is_one_request():
    late = tile(line(1024, 4), 4)
    assert sectors_of(late, np.ones(1024, bool), 4) == (32 * 5, 32 * 4)
    assert sectors_of(late, np.ones(1024, bool), 4, whole=True) == (129, 128)

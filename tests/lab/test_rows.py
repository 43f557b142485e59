"""Ratios and verdicts, in the one place where they are computed."""

import pytest

from tilestack.lab.rows import Row, set_ratios, times_faster, verdict


def test_ratios_are_against_the_best_other_peer():
    rows = [
        Row("softmax", "c", "bfloat16", "forward", backend, time_us=time)
        for backend, time in [("triton", 10.0), ("aten", 20.0), ("compile", 15.0), ("torch", 60.0), ("liger", None)]
    ]
    set_ratios(rows)
    assert {row.backend: row.ratio_to_best_peer for row in rows} == {
        "triton": 1.5,
        "aten": 0.75,
        "compile": pytest.approx(20 / 15),
        "torch": 0.25,
        "liger": None,
    }


def test_nothing_to_divide_by_is_no_ratio():
    alone = [Row("add", "c", "bfloat16", "forward", "triton", time_us=3.0)]
    free = [Row("add", "c", "bfloat16", "backward", backend, time_us=0.0) for backend in ("triton", "aten")]
    set_ratios(alone)
    set_ratios(free)
    assert alone[0].ratio_to_best_peer is None
    assert [row.ratio_to_best_peer for row in free] == [1.0, 1.0]
    assert free[0].verdict == "equal"
    assert times_faster(0.0, 3.0) is None


@pytest.mark.parametrize(
    ("ours", "peer", "word"),
    [
        ((10.0, 0.0), (20.0, 0.0), "faster"),
        ((20.0, 0.0), (10.0, 0.0), "slower"),
        ((10.0, 0.0), (10.04, 0.0), "equal"),  # to two decimals
        ((10.0, 0.06), (10.5, 0.0), "equal"),  # within our spread
        ((10.0, 0.0), (10.5, 0.06), "equal"),  # within the peer's
        ((10.0, 0.01), (10.5, 0.01), "faster"),
        ((10.0, None), (10.5, None), "faster"),
    ],
)
def test_a_difference_within_the_spread_is_none(ours, peer, word):
    made = lambda backend, figures: Row(
        "softmax", "c", "bfloat16", "forward", backend, figures[0], figures[1]
    ).as_dict()
    assert verdict(made("triton", ours), made("aten", peer)) == word


def test_another_s_kernel_is_no_win():
    rows = [
        Row("attention", "c", "bfloat16", direction, backend, time_us=time)
        for direction in ("forward", "backward")
        for backend, time in (("gluon", 5.0), ("aten", 10.0))
    ]
    for pair in (rows[:2], rows[2:]):
        set_ratios(pair)
    assert [row.verdict for row in rows if row.backend == "gluon"] == ["same kernel", "faster"]

"""What codes cost is measured against the operator without them, told beside the time, and less where keys lose their mean."""

import pytest
import torch
from made_up import cells, contest, save, small_result

from tilestack import ops
from tilestack.contract.cases import Make
from tilestack.lab.bench import operators as lab
from tilestack.lab.bench import terminal_tables
from tilestack.lab.bench.quality import QUERIES, quality_of, truth_without_codes
from tilestack.lab.bench.roofs import Roofs
from tilestack.lab.machine import stamp
from tilestack.lab.rows import Row
from tilestack.lab.tables.by_name import table
from tilestack.ops.quantised_attention import E4M3, attention_of_codes, mean_key, with_far_channels

ENOUGH = 0.999  # the cosine that attention in int8 is to have
HOW = [(torch.int8, "same"), (torch.int8, "fp8"), (E4M3, "fp8")]


def realistic(rule):
    return with_far_channels(Make(torch.bfloat16), 1, 700, 700, 4, 2, 128, 128, rule)


def quality_less(arguments, codes, values, middle):
    q, k, v, causal = (arguments[name] for name in ("q", "k", "v", "causal"))
    out = attention_of_codes(q, k, v, middle, None, causal, None, codes, values)
    return quality_of(out, truth_without_codes(ops.attention_int8, ops.attention_int8.bind(**arguments)))


@pytest.mark.parametrize("rule", ["causal", "full"])
def test_int8_is_close_enough_and_closer_without_the_mean_of_the_keys(rule):
    arguments = realistic(rule)
    smooth = {how: quality_less(arguments, *how, mean_key(arguments["k"])) for how in HOW}
    rough = {how: quality_less(arguments, *how, torch.zeros(())) for how in HOW}
    for how in HOW:
        assert smooth[how].cosine > rough[how].cosine, how
        assert smooth[how].relative_error < rough[how].relative_error, how
    assert smooth[torch.int8, "same"].cosine >= ENOUGH > rough[torch.int8, "same"].cosine
    assert smooth[torch.int8, "fp8"].cosine >= ENOUGH
    errors = [smooth[how].relative_error for how in HOW]
    assert errors == sorted(errors), "fewer bits cost more"


def test_quality_is_an_angle_and_a_distance():
    truth = torch.tensor([[[3.0]], [[4.0]]], dtype=torch.float64)
    same = quality_of(torch.tensor([[[9.0]], [[3.0]], [[4.0]]]), truth)
    assert same == (pytest.approx(1.0), 0.0), "tokens before those that are held against the truth do not count"
    longer = quality_of(2 * truth, truth)
    assert longer == (pytest.approx(1.0), pytest.approx(1.0))
    turned = quality_of(torch.tensor([[[-4.0]], [[3.0]]]), truth)
    assert turned == (pytest.approx(0.0, abs=1e-12), pytest.approx(2**0.5))


def test_the_truth_is_attention_of_the_last_queries():
    arguments = ops.attention_fp8.bind(**realistic("causal"))
    truth = truth_without_codes(ops.attention_fp8, arguments)
    whole = ops.attention(*(arguments[name].double() for name in "qkv"))
    torch.testing.assert_close(truth, whole[:, -QUERIES:])
    assert truth_without_codes(ops.attention, arguments) is None
    packed = arguments | dict(cu_seqlens=torch.tensor([0, 700]))
    assert truth_without_codes(ops.attention_fp8, packed) is None


def test_the_truth_of_pages_is_what_the_last_queries_see_of_them():
    operator = ops.paged_attention_codes
    by_name = {case.name: operator.bind(**case.build(Make(torch.bfloat16))) for case in operator.cases[:9]}
    chunk = by_name["promptx256x2x1x96x96xint8xcapped"]
    truth = truth_without_codes(operator, chunk)
    found = quality_of(operator(**chunk), truth)
    assert truth.shape[0] == 33
    assert 0.999 < found.cosine < 1 - 1e-9
    assert quality_of(ops.paged_attention(**chunk | dict(q=chunk["q"].double())), truth).relative_error < 1e-12
    padded = by_name["mixedx16x6x2x16x24xint8xlong"]
    assert truth_without_codes(operator, padded) is None


def test_the_bench_tells_it_of_every_candidate_and_times_no_backward(monkeypatch):
    monkeypatch.setattr(lab, "measure_roofs", lambda device: Roofs(0.01, {"float32": 0.05, "bfloat16": 0.05}, 2.0))
    rows = lab.bench_operators([ops.attention_int8], ["bfloat16"], cases="1x33x33x1x1x8x8xfull", backends=["torch", "eager", "none"], device="cpu")  # fmt: skip
    assert {row.direction for row in rows} == {"forward"}
    torch_row, eager, none = rows
    assert 0 < eager.relative_error < torch_row.relative_error < 0.1
    assert eager.cosine > torch_row.cosine > 0.99
    assert none.cosine is None
    (plain,) = lab.bench_operators(
        [ops.softmax], cases="3x33x-1", directions=["forward"], backends=["torch"], device="cpu"
    )
    assert plain.cosine is plain.relative_error is None


def test_tables_have_columns_for_it_where_a_row_does(tmp_path):
    case = "4x4096x4096x32x32x128x128xcausal"
    figures = dict(cosine=0.99912, relative_error=0.0419)
    rows = [*small_result().rows, *contest("attention_fp8", case, 80.0, {"eager": 100.0}, **figures)]
    result = small_result()
    result.rows[:] = rows
    save(tmp_path, result)
    header, _, only = cells(table("operator imaginary attention_fp8", tmp_path))
    assert header[-2:] == ["cosine", "relative error"]
    assert only[-2:] == ["0.99912", "4.19%"]
    header, *_ = cells(table("operator imaginary softmax", tmp_path))
    assert "cosine" not in header
    header, _, quantised, *others = cells(table("operator imaginary attention_fp8,softmax", tmp_path))
    assert quantised[-2:] == ["0.99912", "4.19%"]
    of_cases = [line for line in others if len(line) == len(header)]  # means over them come below
    assert {tuple(line[-2:]) for line in of_cases} == {("–", "–")}
    shown = terminal_tables.render_rows([Row.from_dict(rows[-1])], stamp("cpu"))[0]
    assert {"cosine", "relative\nerror"} <= {column.header for column in shown.columns}

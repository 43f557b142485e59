"""What people read for a case: words for every case of every operator, each its own, whatever results call it."""

import io

import pytest
import torch
from rich.console import Console

from tilestack.contract import operators
from tilestack.contract.cases import cases
from tilestack.contract.labels import label_of_arguments, phrase
from tilestack.lab.catalogue import catalogue, render_operator, render_operators, unwrapped
from tilestack.lab.labels import case_label, labels_of
from tilestack.lab.proof.claims import Proof
from tilestack.lab.proof.refuted import refutations


def only_case(build, *size):
    (case,) = cases(build, check=[size])
    return case


def test_sizes_go_by_the_names_that_the_builder_gives_them():
    case = only_case(lambda make, batch, query_heads, keys, rule, interleaved: {}, 4, 16, 1, "causal", False)
    assert case.label == "batch 4, 16 query heads, keys 1, rule causal"
    assert case.name == "4x16x1xcausalxFalse"  # what results and tuning tables know it by


def test_unnamed_sizes_are_the_shapes_of_what_is_made():
    rows = lambda make, *size: dict(x=make.normal(*size), weight=make.normal(size[-1]), eps=None)
    assert only_case(rows, 8192, 4096).label == "8192×4096"
    along = lambda make, *size: dict(x=make.normal(*size[:-1]), dim=size[-1])
    assert only_case(along, 3, 40, -1).label == "3×40, dim -1"
    mask = lambda make, *size: dict(x=make.normal(*size), mask=make.integers(1, size[-1], high=2))
    assert only_case(mask, 3, 40).label == "x 3×40, mask 1×40"
    assert only_case(lambda make, *size: dict(x=make.normal(*size))).label == "scalar"


def test_options_are_words_and_those_that_are_off_are_silent():
    assert [phrase("causal", value) for value in (True, False, None)] == ["causal", "", ""]
    assert label_of_arguments(dict(dims=(0, 2, 1), approximate="tanh")) == "dims 0 2 1, approximate tanh"


@pytest.mark.parametrize("op", [described.name for described in operators()])
def test_every_case_has_words_of_its_own(op):
    labels = labels_of(op)
    assert all(labels.values())
    assert len(set(labels.values())) == len(labels)


def test_results_of_no_operator_keep_their_names():
    assert case_label("train", "qwen3-0.6b, 8x2048") == "qwen3-0.6b, 8×2048"
    assert case_label("softmax", "7x9x-1xgone") == "7×9x-1xgone"
    assert case_label("rope", "4x2048x16x8x128x128xbatchxFalse").startswith("batch 4, sequence 2048, 16 query heads")


def test_what_the_tables_show_most_is_words():
    assert (
        case_label("embedding", "8192x151936x1024x8") == "8192 tokens, vocabulary 151936, width 1024, 8 different ids"
    )
    assert case_label("qk_norm_rope", "4x2048x16x8x128x128xbatchxFalse") == (
        "batch 4, sequence 2048, 16 query heads, 8 key heads, head dim 128, rotary 128, positions batch"
    )


def test_a_refutation_says_the_case_in_words():
    proof = Proof("softmax", "triton", "2x8200x-1", "plain", "float32", "forward", False, 1.0, 0.5, "out: wrong")
    assert refutations([proof]) == ["[red]WRONG[/red] softmax triton 2×8200, dim -1, plain float32 forward: out: wrong"]


def test_one_operator_in_full_lists_its_cases_in_words_and_by_name():
    import io

    import torch
    from rich.console import Console

    described = next(found for found in operators() if found.name == "attention")
    page = io.StringIO()
    Console(file=page, width=200).print(render_operator(described, torch.device("cpu")))
    assert "batch 64, queries 1, 4096 keys, 32 heads" in page.getvalue()
    assert "64x1x4096x32x8x128x128xcausal" in page.getvalue()
    narrow = io.StringIO()
    Console(file=narrow, width=80).print(render_operator(described, torch.device("cpu")))
    assert "…" not in narrow.getvalue()
    assert "Rows are aligned at their ends" in narrow.getvalue()  # the docstring breaks its lines elsewhere


def test_formulas_in_a_docstring_keep_their_lines():
    assert unwrapped("One\n    line.\n\n        a = b\n        c = d\n    ") == "One line.\n\n    a = b\n    c = d"


def test_names_of_operators_are_whole_on_a_narrow_terminal():
    lines = io.StringIO()
    Console(file=lines, width=80).print(render_operators(catalogue(torch.device("cpu"), operators())))
    assert {operator.name for operator in operators()} <= set(lines.getvalue().split())

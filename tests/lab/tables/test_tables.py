"""Generated tables say what the result files say, and a page that says something else is noticed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_up import MACHINE, cells, contest, row, rows_of_two_backends, save, small_result

from tilestack import ops
from tilestack.contract.cases import Make
from tilestack.lab.bench.candidates import kernel_lender
from tilestack.lab.contests import Result, contests, results_under
from tilestack.lab.mutation.record import code_hash
from tilestack.lab.stale import present_source
from tilestack.lab.tables.by_name import TableError, table
from tilestack.lab.tables.generated import stale_tables, update_tables
from tilestack.lab.tables.summary import Line, weakest

STAMP = "_Measured on Imaginary GPU 9000, torch 2.99.0, Triton 3.99.1, commit abc1234, 2031-05-06, kernel time by CUDA-graph replay with cold caches._"


@pytest.fixture
def root(tmp_path) -> Path:
    save(tmp_path, small_result())
    return tmp_path


def test_headline_has_one_line_per_operator(root):
    written = table("headline imaginary", root)
    header, _, *rows = cells(written)
    assert header[0] == "operator"
    assert sorted(rows) == [
        ["`linear`", "4096 rows, 4096 columns, inner 4096, bfloat16 forward", "400 µs", "344 TFLOP/s", "49%", "0.55× (slower than aten)", "9.5 µs", "0 of 1"],
        ["`softmax`", "8192×4096, dim -1, bfloat16 forward", "80.0 µs", "3.36 TB/s", "84%", "**1.25×** compile", "9.5 µs", "1 of 2"],
    ]  # fmt: skip
    assert written.endswith(STAMP)


def test_a_ladder_has_a_column_per_backend(root):
    small = small_result()
    (case,) = {each["case"] for each in small.rows if each["op"] == "linear"}
    product = dict(moved=100_663_296, flops=137_438_953_472)
    rungs = [row("linear", case, name, time, **product) for name, time in (("triton_naive", 800.0), ("gluon", 200.0))]
    save(root, replace(small, rows=[*small.rows, *rungs]))
    written = table("ladder imaginary linear triton_naive,triton,triton_persistent,gluon,aten", root)
    header, _, only = cells(written)
    assert header[3:] == ["`triton_naive`", "`triton`", "`gluon`", "`aten`"]
    assert only[3:] == ["172 TFLOP/s", "344 TFLOP/s", "687 TFLOP/s", "625 TFLOP/s"]
    assert "\n\n_Not measured yet: `triton_persistent`._\n\n" in written
    assert "not measured yet" in table("ladder imaginary softmax triton_naive,gluon", root)
    assert "not measured yet" in table("ladder unknown linear triton,aten", root)


def test_a_rung_of_a_ladder_is_marked_for_itself(root):
    """A faster rung of the present source does not speak for one that has changed since, nor does one that is not shown."""
    small = small_result()
    (case,) = {row["case"] for row in small.rows if row["op"] == "linear"}
    old = dict(source="0" * 16)
    rungs = [row("linear", case, "triton_naive", 800.0, commit="01d1234", **old), row("linear", case, "gluon", 200.0)]
    save(root, replace(small, rows=[*small.rows, *rungs, row("linear", case, "gluon_few_rows", 100.0, **old)]))
    written = table("ladder imaginary linear triton_naive,triton,gluon,aten", root)
    _, _, only = cells(written)
    assert [cell.endswith(" †") for cell in only] == [False] * 3 + [True, False, False, False]
    assert written.endswith("outdated until measured again; at commit 01d1234 `linear`._")


def test_training_has_a_line_per_candidate_and_stays_out_of_the_headline(root):
    steps = [
        row("train", "tiny, 2x8", name, time, tokens_per_s=16e6 / time, ratio_to_best_peer=ratio, peak_mib=2048.0)
        for name, time, ratio in (("transformers", 3000.0, None), ("tilestack", 2000.0, 1.5))
    ]
    steps[1] |= {"first_loss": 4.16, "last_loss": 3.5}
    steps.append(row("train", "tiny, 2x8", "plain", None, note="out of memory"))
    save(root, replace(small_result(), rows=steps), "train")
    assert cells(table("training imaginary", root))[2:] == [
        ["tiny, 2×8", "**tilestack**", "8,000", "2.0 ms", "2.0 GiB", "4.160 → 3.500", "1.50×"],
        ["tiny, 2×8", "transformers", "5,333", "3.0 ms", "2.0 GiB", "not recorded", "–"],
        ["tiny, 2×8", "plain", "out of memory", "–", "–", "–", "–"],
        ["tiny, 2×8", "not tried: tilestack-graph, tilestack-compile, tilestack-fp8, tilestack-fp8-head, plain-compile, transformers-compile, transformers-liger", "–", "–", "–", "–", "–"],
    ]  # fmt: skip
    assert "train" not in table("headline imaginary", root)


def test_layers_have_a_column_per_candidate_and_stay_out_of_the_operators(root):
    small, case = small_result(), "mlp, tiny, 2x8"
    times = (("tilestack", 200.0), ("plain", 300.0), ("transformers", 250.0))
    steps = [row("layer", case, name, time, direction="both") for name, time in times]
    steps += [row("layer", case, "plain", 90.0), row("layer", case, "tilestack", 120.0, source="0" * 16)]
    save(root, replace(small, rows=steps), "layers")
    header, _, *rows = cells(table("layers imaginary", root))
    assert header[3:] == ["tilestack", "plain", "transformers", "of the roof", "against the best peer"]
    assert rows == [
        ["mlp, tiny, 2×8 †", "bfloat16", "forward", "120 µs", "90.0 µs", "–", "56%", "0.75× (slower than plain)"],
        ["mlp, tiny, 2×8", "bfloat16", "both", "200 µs", "300 µs", "250 µs", "34%", "**1.25×** transformers"],
    ]
    assert "layer" not in table("headline imaginary", root)
    written = table("summary imaginary nothing softmax", root)
    assert "layer of a decoder †" in written
    assert "All 2 operators and optimizers" in written


def test_headline_of_some_operators_has_only_those(root):
    assert [row[0] for row in cells(table("headline imaginary softmax,relu", root))[2:]] == ["`softmax`"]


def test_operator_table_has_every_case_in_the_order_asked_for(root):
    written = table("operator imaginary softmax,linear", root)
    _, _, *rows = [line for line in cells(written) if len(line) == 9]
    assert [(r[0], r[1], r[3], r[7]) for r in rows] == [
        ("`softmax`", "8192×4096, dim -1", "forward", "**1.25×** compile"),
        ("`softmax`", "8192×1024, dim -1", "forward", "0.75× (slower than aten)"),
        ("`softmax`", "8192×4096, dim -1", "backward", "no peer"),
        ("`linear`", "4096 rows, 4096 columns, inner 4096", "forward", "0.55× (slower than aten)"),
    ]
    assert written.endswith(STAMP)


def test_under_an_operator_stand_the_means_of_its_cases(tmp_path):
    save(tmp_path, replace(small_result(), rows=rows_of_two_backends()))
    written = table("operator imaginary linear", tmp_path)
    slowest = "0.12× (8 rows, 4096 columns, inner 1024)"
    assert cells(written)[5:] == [
        ["operator", "dtype", "direction", "backend", "cases", "geometric mean against the best peer", "least"],
        ["---", "---", "---", "---", "--:", "--:", "--:"],
        ["`linear`", "bfloat16", "forward", "fastest of ours", "3", "0.79×", slowest],  # (2 · 1/8 · 2)^⅓
        ["`linear`", "bfloat16", "forward", "gluon", "2 of 3", "2.00×", "2.00× (64 rows, 4096 columns, inner 1024)"],
        ["`linear`", "bfloat16", "forward", "triton", "3", "0.40×", slowest],  # (1 · 1/8 · 1/2)^⅓
    ]
    assert written.endswith(STAMP)


def test_means_of_an_older_source_are_marked(tmp_path):
    """A backend's own source counts, also where another of ours is faster."""
    first, *others = rows_of_two_backends()
    assert first["backend"] == "triton"
    save(tmp_path, replace(small_result(), rows=[first | {"source": "older"}, *others]))
    written = table("operator imaginary linear", tmp_path)
    assert [line[0] for line in lines_of_means(written)] == ["`linear`", "`linear`", "`linear` †"]
    assert written.endswith("at commit abc1234 `linear`._")


def test_means_are_of_several_cases_with_a_peer_and_a_kernel_of_ours(root):
    assert "geometric mean" not in table("operator imaginary linear", root), "one case"
    (only,) = lines_of_means(table("operator imaginary softmax", root))
    assert only[2:] == ["forward", "triton", "2", "0.97×", "0.75× (8192×1024, dim -1)"]  # √(5/4 · 3/4)
    borrowed = [row | {"lender": "cuBLAS"} if row["backend"] == "gluon" else row for row in rows_of_two_backends()]
    save(root, replace(small_result(), rows=borrowed))
    means = lines_of_means(table("operator imaginary linear", root))
    assert [line[3:6] for line in means] == [["triton", "3", "0.40×"]], "the fastest has one case of its own left"


def lines_of_means(written: str) -> list[list[str]]:
    return [line for line in cells(written) if len(line) == 7][2:]


@pytest.mark.parametrize(
    ("ours", "spread", "said", "won"),
    [
        (100.1, 0.0, "1.00× (equal to aten)", "0 of 1, 1 equal"),  # what rounds to even
        (95.0, 0.06, "1.05× (equal to aten)", "0 of 1, 1 equal"),  # what the spread explains
        (105.0, 0.06, "0.95× (equal to aten)", "0 of 1, 1 equal"),
        (95.0, 0.01, "**1.05×** aten", "1 of 1"),
        (105.0, 0.01, "0.95× (slower than aten)", "0 of 1"),
    ],
)
def test_a_difference_within_the_spread_is_equal_in_words_and_in_the_count(tmp_path, ours, spread, said, won):
    save(tmp_path, replace(small_result(), rows=contest("softmax", "8x8x-1", ours, {"aten": 100.0}, spread=spread)))
    shown = cells(table("headline imaginary", tmp_path))[2]
    assert (shown[5], shown[7]) == (said, won)


def test_a_borrowed_kernel_wins_nothing_and_says_whose_it_is(tmp_path):
    rows = [row | {"backend": {"triton": "gluon"}.get(row["backend"], row["backend"])} for row in contest("attention", "c", 80.0, {"aten": 100.0})]  # fmt: skip
    backward = [row | {"direction": "backward"} for row in rows]
    save(tmp_path, replace(small_result(), rows=rows + backward))
    written = [line[7] for line in cells(table("operator imaginary attention", tmp_path))[2:]]
    assert written == ["1.25× aten (no win: this is cuDNN's kernel)", "**1.25×** aten"]
    assert cells(table("headline imaginary", tmp_path))[2][7] == "1 of 1"


def test_a_definition_that_nobody_writes_is_no_peer_alone(tmp_path):
    """Dropout's spells out its random numbers: to be faster than it, compiled, is no win, and to be slower a loss."""
    refused = row("dropout", "c", "eager", None, note="it has no dropout for these arguments")
    for ours, usual, said, won in (
        (10.0, [], "usual code not timed", "–"),
        (200.0, [], "0.90× (slower than compile)", "0 of 1"),
        (10.0, [row("dropout", "c", "eager-compile", 11.0)], "**1.10×** eager-compile", "1 of 1"),
        (10.0, [refused], "**18.00×** compile", "1 of 1"),
    ):
        save(tmp_path, replace(small_result(), rows=[*contest("dropout", "c", ours, {"compile": 180.0}), *usual]))
        shown = cells(table("headline imaginary", tmp_path))[2]
        assert (shown[5], shown[7]) == (said, won)
    for op, said in (("dropout", "usual code not timed"), ("add", "no peer")):
        save(tmp_path, replace(small_result(), rows=[row(op, "c", "triton", 10.0)]))
        assert cells(table("headline imaginary", tmp_path))[2][5] == said


def test_a_row_that_says_whose_kernel_it_measured_is_believed(tmp_path):
    rows = [row | {"backend": {"triton": "gluon"}.get(row["backend"], row["backend"])} for row in contest("attention", "c", 80.0, {"aten": 100.0})]  # fmt: skip
    for lender, said in {"": "**1.25×** aten", "cuBLAS": "1.25× aten (no win: this is cuBLAS's kernel)"}.items():
        save(tmp_path, replace(small_result(), rows=[row | {"lender": lender} for row in rows]))
        assert [line[7] for line in cells(table("operator imaginary attention", tmp_path))[2:]] == [said]


@pytest.mark.parametrize(
    ("config", "ends", "direction", "lender"),
    [
        ("own", None, "forward", ""), ("own", None, "backward", ""),
        ("cudnn", None, "forward", "cuDNN"), ("cudnn", None, "backward", ""), ("cudnn", [0, 60, 128], "forward", ""),
        ("cudnn_backward", None, "forward", ""), ("cudnn_backward", None, "backward", "cuDNN"),
        ("cudnn_backward", None, "both", ""), ("cudnn_backward", [0, 60, 128], "backward", ""),
    ],
)  # fmt: skip
def test_a_configuration_says_whose_kernel_it_runs(config, ends, direction, lender, monkeypatch):
    heads = Make(torch.bfloat16, "meta").normal(1, 128, 2, 128)
    given = ops.attention.bind(q=heads, k=heads, v=heads, cu_seqlens=ends and torch.tensor(ends, device="meta"))
    configs = ops.attention.implementations["gluon"].configs
    monkeypatch.setattr(ops.attention.implementations["gluon"], "configs", {config: configs[config]})
    assert kernel_lender(ops.attention, "gluon", given, direction) == lender


def test_rows_of_an_older_source_are_marked_with_their_commit(root):
    result = small_result()
    old = {"source": "another", "commit": "0ld0000"}  # of a case that has no line of its own
    save(root, replace(result, rows=[row | old if row["case"] == "8192x1024x-1" else row for row in result.rows]))
    written = table("headline imaginary", root)
    assert sorted(line[0] for line in cells(written)[2:]) == ["`linear`", "`softmax` †"]
    assert written.endswith("\n\n_† measured on an older version of the code, outdated until measured again; at commit 0ld0000 `softmax`._")  # fmt: skip
    without = [{key: value for key, value in row.items() if key != "source"} for row in result.rows]
    save(root, replace(result, rows=without))
    lines = [line for line in cells(table("operator imaginary softmax,linear", root)) if line[0][:1] == "`"]
    assert len(lines) == 5
    assert all(line[0].endswith(" †") for line in lines)
    assert "at commit abc1234 `softmax`, `linear`" in table("operator imaginary softmax,linear", root)


def test_roofs_are_those_of_the_last_run(root):
    later = replace(small_result(), machine=MACHINE | {"date": "2032"}, roofs=small_result().roofs | {"copy_tb_per_s": 3.5})  # fmt: skip
    save(root, later, "later")
    assert ["copy, read and written", "3.50 TB/s"] in cells(table("roofs imaginary", root))
    assert ["matrix product in float32", "50 TFLOP/s"] in cells(table("roofs imaginary", root))


def test_proofs_are_of_the_present_source_or_say_so(root):
    kept = dict(dtype="float32", direction="forward", proved=12, wrong=0, worst=0.4, commit="abc1234")
    made = lambda op, **others: kept | dict(op=op, backend="triton", source=present_source(op, "triton")) | others
    proofs = [made("softmax"), made("softmax", direction="backward", worst=0.7), made("relu", source="another"), made("add", proved=10, wrong=2)]  # fmt: skip
    assert table("proofs imaginary", root).startswith("_no proofs were kept yet: `tilestack verify --save`")
    (root / "results" / "imaginary" / "proofs.json").write_text(json.dumps({"proofs": proofs}))
    lines = {(line[0], line[1]): line[2:] for line in cells(table("proofs imaginary", root))[2:]}
    assert lines["`softmax`", "triton"] == ["yes", "float32", "forward, backward", "24", "70%"]
    assert lines["`relu`", "triton"][0] == "of an older source (abc1234)"
    assert lines["`add`", "triton"][0] == "2 of 12 claims fail"
    assert lines["`attention`", "gluon"] == ["no proof", "–", "–", "0", "–"]
    assert ("`softmax`", "aten") not in lines


def test_runs_at_different_commits_are_all_named(root):
    save(
        root, Result(MACHINE | {"commit": "def5678"}, small_result().roofs, [row("gelu", "8x8", "triton", 5.0)]), "gelu"
    )
    assert table("headline imaginary", root).count("commit abc1234") == 1
    assert table("headline imaginary", root).count("commit def5678") == 1
    assert "def5678" not in table("operator imaginary softmax", root)


def test_a_candidate_that_failed_is_not_a_peer(root):
    found = contests(results_under(root / "results"))
    first = next(c for c in found if (c.op, c.case) == ("softmax", "8192x4096x-1") and c.direction == "forward")
    assert first.peer["backend"] == "compile"
    assert first.ours["backend"] == "triton"
    assert first.ratio == 100 / 80


@pytest.mark.parametrize("name", ["headline h100", "operator imaginary relu", "operator h100 softmax"])
def test_without_results_it_says_so(root, name):
    assert table(name, root).startswith("_not measured yet: `tilestack bench --save`")


@pytest.mark.parametrize("name", ["headlines imaginary", "headline", "operator imaginary", "headline a b c", ""])
def test_an_unknown_table_is_an_error_that_names_the_page(root, name):
    (root / "README.md").write_text(f"<!-- table: {name} -->\n<!-- /table -->\n")
    with pytest.raises(TableError, match=r"README\.md: no table is named .*`headline GPU"):
        update_tables(root)


@pytest.mark.parametrize("tail", ["", "<!-- table: headline imaginary -->\n<!-- /table -->\n"])
def test_an_unclosed_table_is_an_error(root, tail):
    (root / "README.md").write_text("<!-- table: headline imaginary -->\ntext\n" + tail)
    with pytest.raises(TableError, match=r"README\.md: the table 'headline imaginary' is not closed"):
        stale_tables(root)


PAGE = "before\n\n<!-- table: headline imaginary -->\n<!-- /table -->\n\nbetween\n\n<!-- table: operator imaginary linear -->\nlast year\n<!-- /table -->\nafter\n"


def test_pages_are_rewritten_in_place_and_only_once(root):
    nested = root / "docs" / "zh" / "norm.md"
    nested.parent.mkdir(parents=True)
    for path in (root / "README.md", root / "README.zh-CN.md", nested):
        path.write_text(PAGE, encoding="utf-8")
    (root / "docs" / "plain.md").write_text("no tables here\n")
    assert update_tables(root) == [root / "README.md", root / "README.zh-CN.md", nested]
    text = nested.read_text(encoding="utf-8")
    assert text.startswith("before\n\n<!-- table: headline imaginary -->\n| operator |")
    assert "_\n<!-- /table -->\n\nbetween\n\n<!-- table: operator" in text
    assert text.endswith("<!-- /table -->\nafter\n")
    assert "last year" not in text
    assert update_tables(root) == []


def test_staleness_is_seen_from_both_sides(root):
    page = root / "README.md"
    page.write_text(PAGE)
    assert stale_tables(root) == [page]
    update_tables(root)
    assert stale_tables(root) == []
    page.write_text(page.read_text(encoding="utf-8").replace("400 µs", "100 µs"), encoding="utf-8")  # an edited claim
    assert stale_tables(root) == [page]
    update_tables(root)
    save(root, replace(small_result(), rows=contest("softmax", "8192x4096x-1", 70.0, {"aten": 120.0})))  # new results
    assert stale_tables(root) == [page]


def test_markers_shown_as_code_are_left_alone(root):
    (root / "README.md").write_text("```\n<!-- table: headline NAME -->\n<!-- /table -->\n```\n")
    assert stale_tables(root) == []


def test_this_repository_is_fresh():
    repository = Path(__file__).resolve().parents[3]
    assert stale_tables(repository) == [], "run `make docs` and commit what it changes"


def test_mutants_are_counted_by_family_and_survivors_have_their_reasons(root):
    assert table("mutation", root).startswith("_nothing was tried yet: `python -m tests.mutation`")
    of_today = dict(source=code_hash("tiles"), mutants=9, commit="abc1234")
    tiles = dict(
        tried=4, caught={"mask": [1, 2], "term": [1, 2]}, survivors={"tiles f: a → b": 7, "tiles g: a | b → a": 7}
    )
    rows = dict(
        tried=5, caught={"mask": [5, 5]}, survivors={}, by_tests={"norm.rows f: a → b": "tests/test_norm.py::test"}
    )
    tma = dict(source=code_hash("matmul.tma"), mutants=2)
    of_gpus = dict(tried=1, caught={"mask": [0, 1]}, survivors={"matmul.gemv f: a → b": 7})
    kept = {
        "matmul.gemv": of_today | of_gpus | dict(source=code_hash("matmul.gemv")), "matmul.tma": tma,
        "tiles": of_today | tiles, "norm.rows": of_today | rows | dict(source="another"),
    }  # fmt: skip
    known = {"tiles f: a → b": "equivalent: as it says", "matmul.gemv f: a → b": "seen on a GPU only: as it says"}
    (root / "results" / "mutation.json").write_text(json.dumps({"files": kept}))
    (root / "results" / "mutation_reasons.json").write_text(json.dumps(known))
    written = table("mutation", root)
    assert cells(written)[2:] == [
        ["matmul", "2", "11", "1", "0", "0", "0", "1", "0", "0.0%"],
        ["norm †", "1", "9", "5", "5", "1", "0", "0", "0", "100.0%"],
        ["tiles", "1", "9", "4", "2", "0", "1", "0", "1", "66.7%"],
        ["all †", "4", "29", "10", "7", "1", "1", "1", "1", "77.8%"],
    ]
    assert "at commit abc1234. Not reachable in the interpreter, so not tried: `matmul.tma`." in written
    assert written.endswith("of an older version of the code: `norm.rows`._")
    listed = table("survivors", root).splitlines()[2:]
    assert listed == [
        "| `matmul.gemv` | `f: a → b` | seen on a GPU only: as it says |",
        "| `tiles` | `f: a → b` | equivalent: as it says |",
        "| `tiles` | `g: a \\| b → a` | **not known yet** |",
    ]


def test_engines_stand_beside_each_other_by_workload(tmp_path):
    assert "not measured yet" in table("serving imaginary", tmp_path)
    served = lambda backend, case, figure, unit, seconds: dict(
        op="serve", case=case, dtype="bfloat16", direction="forward", backend=backend, figure=figure, unit=unit,
        seconds=seconds, roof=0.5, date="2031-05-06T07:08:09Z", commit="abc1234", device="cuda",
        source=present_source("serve", backend, "cuda"), versions={"tilestack": "0.9", "vllm": "0.99.1"},
    )  # fmt: skip
    rows = [
        served("tilestack", "batch 1", 1.25, "ms/step", 1.0),
        served("tilestack lookup", "copying", 5000.4, "tokens/s", 2.0),
        served("vllm", "batch 1", 2.5, "ms/step", 2.0),
        served("vllm", "batch 1", 5.0, "ms/step", 4.0) | {"model": "of another size"},
    ]
    shuffled = [
        served("tilestack", case, 1, "ms", 1) for case in ("new", "copying", "batch 64", "batch 8", "throughput")
    ]
    save(tmp_path, replace(small_result(), rows=shuffled), "serve")
    _, _, *lines = cells(table("serving imaginary", tmp_path))
    assert [line[0] for line in lines] == ["throughput", "batch 8", "batch 64", "copying", "new"]
    save(tmp_path, replace(small_result(), rows=rows), "serve")
    header, _, *lines = cells(written := table("serving imaginary", tmp_path))
    assert header[-2:] == ["vllm", "against vllm"]
    assert lines == [
        ["batch 1", "tilestack", "**1.25** ms/step", "50%", "2.50", "2.00×"],
        ["copying", "tilestack lookup", "**5,000** tokens/s", "50%", "–", "–"],
    ]
    when = "2031-05-06 07:08"
    ours = [f"{name} 0.9 at abc1234 {when}" for name in ("tilestack", "tilestack lookup")]
    assert written.endswith(f"{', '.join(ours)}, vllm 0.99.1 {when}._")
    rows[1:] = [rows[1] | {"source": "older"}, rows[2] | {"source": "older", "commit": "dcb4321"}]
    save(tmp_path, replace(small_result(), rows=rows), "serve")
    _, _, *lines = cells(written := table("serving imaginary", tmp_path))
    assert [[line[1], line[4]] for line in lines] == [["tilestack", "2.50 †"], ["tilestack lookup †", "–"]]
    assert written.endswith("at commit abc1234 tilestack lookup; dcb4321 vllm._")
    save(tmp_path, replace(small_result(), rows=[rows[0], rows[2] | {"versions": {}}]), "serve")
    assert f"vllm of a version not recorded {when}." in table("serving imaginary", tmp_path)


def test_what_http_costs_is_told_of_each_model(tmp_path):
    assert "not measured yet" in table("http imaginary", tmp_path)
    row = lambda backend, figure, cpu=None: dict(
        op="http", case="tiny, 64 streams", dtype="float32", direction="forward", backend=backend, figure=figure,
        unit="tokens/s", **({"cpu_us": cpu} if cpu else {}), answered=64, commit="abc1234", device="cpu", source=present_source("http", backend, "cpu"),
    )  # fmt: skip
    save(tmp_path, replace(small_result(), rows=[row("offline", 2000.0, 100.0), row("http", 1900.0, 108.0)]), "http")
    _, _, *lines = cells(table("http imaginary", tmp_path))
    one = ["tiny, 64 streams", "one", "2,000", "1,900", "5.0%", "100", "108", "**8.0%**"]
    assert lines == [one], "results may be older than the other way"
    both = [row("offline", 2000.0, 100.0), row("http", 1900.0, 108.0), row("http, two processes", 1960.0)]
    save(tmp_path, replace(small_result(), rows=both), "http")
    _, _, *lines = cells(table("http imaginary", tmp_path))
    assert lines == [one, ["tiny, 64 streams", "two", "2,000", "1,960", "2.0%", "100", "–", "–"]]
    older = row("http", 1900.0, 108.0) | {"source": "older"}
    save(tmp_path, replace(small_result(), rows=[row("offline", 2000.0, 100.0), older]), "http")
    _, _, *lines = cells(written := table("http imaginary", tmp_path))
    assert lines[0][0] == "tiny, 64 streams †"
    assert written.endswith("at commit abc1234 tiny, 64 streams._")


def test_the_summary_shows_each_groups_median_case_and_the_weakest_operators(root):
    gpu = small_result()
    served = lambda backend, case, seconds: dict(
        op="serve", case=case, dtype="bfloat16", direction="forward", backend=backend, figure=1e3 * seconds, unit="ms/step",
        seconds=seconds, roof=0.5, date=f"2031-05-{11 if backend == 'transformers' else '09'}T07:08:09Z", commit="abc1234", device="cpu",
        source=present_source("serve", backend, "cpu"), versions={},
    )  # fmt: skip
    rows = [
        served(backend, f"batch {size}", seconds)
        for size, ours, theirs in ((1, 0.01, 0.04), (2, 0.02, 0.03), (4, 0.04, 0.03))
        for backend, seconds in (("tilestack", ours), ("transformers", theirs), ("tilestack int8", ours / 2))
    ]
    rows += [
        served(backend, "first token", seconds) | {"unit": "ms"}
        for backend, seconds in (("tilestack", 0.01), ("transformers", 0.02))
    ]
    rows.append(served("another", "batch 2", 0.06))  # slower than the engine that ours is held against
    of_a_cpu = replace(gpu, machine=MACHINE | {"gpu": "", "cpu": "Imaginary CPU", "slug": "cpu"}, rows=rows)
    save(root, of_a_cpu, "serve")
    lent = contest("linear", "4096x1024x4096xplain", 100.0, {"aten": 220.0})  # by which nothing is won
    save(root, replace(gpu, rows=[*gpu.rows, lent[0] | {"lender": "cuBLAS"}, *lent[1:]]))
    header, _, *lines = cells(written := table("summary imaginary cpu softmax", root))
    assert header[:2] == ["what", "median case"]
    assert lines == [
        ["serving on a CPU, decode step", "batch 2", "20.00 ms/step", "30.00 ms/step (transformers)", "**1.50×**", "0.75× – 4.00×", "2 of 3"],
        ["serving on a CPU, time to first token", "one prompt", "10.00 ms", "20.00 ms (transformers)", "**2.00×**", "–", "1 of 1"],
        ["`softmax`", "8192×1024, dim -1, bfloat16 forward", "32.0 µs", "24.0 µs (aten)", "0.75×", "0.75× – 1.25×", "1 of 2"],
        ["`linear`", "4096 rows, 4096 columns, inner 4096, bfloat16 forward", "400 µs", "220 µs (aten)", "0.55×", "–", "0 of 1"],
    ]  # fmt: skip
    assert "All 2 operators and optimizers with a peer, 3 comparisons: 1 won, 0 equal, 2 lost" in written
    assert "Lowest mean: `linear`, `softmax`." in written
    assert written.endswith("2031-05-06 to 2031-05-11; commits are in results/._")
    old = [row | {"source": "older"} if row["op"] == "softmax" else row for row in gpu.rows]
    save(root, replace(gpu, rows=old))
    _, _, _, _, third, *_ = cells(written := table("summary imaginary cpu softmax", root))
    assert third[0] == "`softmax` †"
    assert "3 comparisons †: 1 won" in written
    assert written.endswith("_† some of these cases were measured on an earlier version of the code._")
    older = [row | {"source": "older"} if row["backend"] == "tilestack" else row for row in rows]
    save(root, replace(of_a_cpu, rows=older), "serve")
    assert cells(table("summary imaginary cpu softmax", root))[2][0] == "serving on a CPU, decode step †"
    assert "not measured yet" in table("summary h100 unknown softmax", root)


def test_the_summary_says_how_many_comparisons_are_without_a_peer_that_every_operator_has(root):
    rows = []
    for case, others in (("8x8x-1", ()), ("8x9x-1", ("compile",)), ("8x10x-1", ("compile", "compile-max"))):
        rows += contest("softmax", case, 10.0, {"aten": 12.0} | dict.fromkeys(others, 11.0))
    rows += contest("adamw", "c", 10.0, {"fused": 12.0})  # no code of ours that could be compiled
    save(root, replace(small_result(), rows=rows))
    written = table("summary imaginary unknown softmax", root)
    assert "`softmax`, `adamw`. Of these, 1 without `torch.compile`, 1 without its mode `max-autotune`._" in written


def test_what_all_operators_come_to_is_marked_where_no_line_shows_what_is_old(root, monkeypatch):
    monkeypatch.setattr("tilestack.lab.tables.summary.WEAKEST", 0)
    gpu = small_result()
    old = [row | {"source": "older"} if row["op"] == "linear" else row for row in gpu.rows]
    save(root, replace(gpu, rows=old))
    _, _, *lines = cells(written := table("summary imaginary unknown softmax", root))
    assert [line[0] for line in lines] == ["`softmax`"]
    assert "3 comparisons †: 1 won" in written
    assert written.endswith("_† some of these cases were measured on an earlier version of the code._")


def test_the_weakest_operators_are_so_by_the_mean_of_their_cases():
    """One bad case among good ones is not worse than cases that are all bad."""
    ratios = {"uneven": [0.1, 4.0, 4.0], "bad": [0.5, 0.6], "worst": [0.3], "good": [2.0]}
    lines = [Line(group, "", "", "", ratio, "", False, []) for group, some in ratios.items() for ratio in some]
    assert weakest(lines) == ["worst", "bad", "uneven"]


def test_many_commits_are_counted_and_few_are_named(root):
    result = small_result()
    each = [row | {"source": "another", "commit": f"c{n}"} for n, row in enumerate(result.rows)]
    save(root, replace(result, rows=each))
    written = table("operator imaginary softmax,linear", root)
    assert "commits, named in results/, 2031-05-06" in written
    assert "outdated until measured again; 4 commits, named in results/._" in written
    assert "commit c0" not in written
    save(root, replace(result, rows=[row | {"commit": f"c{n % 3}"} for n, row in enumerate(each)]))
    written = table("operator imaginary softmax,linear", root)
    assert all(f"c{n}, " in written for n in range(3))
    assert "commits, named" not in written

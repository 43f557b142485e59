"""Loss curves on disk, and the table that shows them."""

from tilestack.lab.tables.by_name import table
from tilestack.lab.training import loss_curves

MACHINE = {"slug": "imaginary", "gpu": "Imaginary GPU 9000", "commit": "abc1234", "date": "2031-05-06T07:08:09Z"}


def run(name, candidate, worst=0.25):
    return dict(name=name, reference=[9.0, 7.5], candidate=candidate, bound=[1.0, 1.0], broken_at=None, worst=worst)


def test_a_run_replaces_the_one_of_its_name_and_the_table_shows_both(tmp_path):
    folder = tmp_path / "results"
    for found in (
        run("every operator", [9.0, 9.0]),
        run("softmax", [9.0, 7.25]),
        run("every operator", [9.125, 7.5], 0.5),
    ):
        loss_curves.merge_curves(folder, MACHINE, "tiny, 2 steps", found)
    written = table("parity imaginary", tmp_path).splitlines()
    assert written[2:4] == [
        "| every operator | 9.00 → 7.50 | 0.1250 | 50% |",
        "| softmax | 9.00 → 7.50 | 0.2500 | 25% |",
    ]
    assert written[-1] == "_tiny, 2 steps; Imaginary GPU 9000, commit abc1234, 2031-05-06._"


def test_runs_of_an_older_source_are_marked_and_those_of_the_present_are_not(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(loss_curves, "source_of_run", lambda: "older")
        loss_curves.merge_curves(tmp_path / "results", MACHINE, "tiny", run("every operator", [9.0, 9.0]))
    loss_curves.merge_curves(tmp_path / "results", MACHINE, "tiny", run("softmax", [9.0, 7.25]))
    written = table("parity imaginary", tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in written[2:4]] == ["| every operator †", "| softmax"]
    assert written[-1] == "_† measured on an older version of the code, outdated until measured again._"


def test_without_curves_it_says_what_to_run(tmp_path):
    assert "`tilestack parity --save`" in table("parity imaginary", tmp_path)


def test_fp8_has_a_file_and_a_table_of_its_own(tmp_path):
    machine = MACHINE | {"torch": "9.9"}
    assert "`tilestack parity --fp8 --save`" in table("fp8-parity imaginary", tmp_path)
    for name in ("tiny, lr 1", "tiny, lr 2"):
        loss_curves.merge_curves(tmp_path / "results", machine, name, run(name, [9.0, 7.25]), loss_curves.FP8_CURVES)
    written = table("fp8-parity imaginary", tmp_path).splitlines()
    assert written[2:4] == [f"| tiny, lr {lr} | 7.500 | 7.250 | 0.250 | 25% | – | – |" for lr in (1, 2)]
    assert written[-1] == "_Imaginary GPU 9000, torch 9.9, commit abc1234, 2031-05-06._"
    assert "`tilestack parity --save`" in table("parity imaginary", tmp_path)


def test_fp8_from_several_starts_shows_its_mean_and_what_chance_makes_of_it(tmp_path):
    ends = [[7.5, 7.75], [7.0, 7.125], [8.0, 8.0], [7.5, 7.625]]  # above by 1/4, 1/8, 0 and 1/8
    found = run("tiny, lr 1", [9.0, 7.25]) | {"ends": ends}
    loss_curves.merge_curves(
        tmp_path / "results", MACHINE | {"torch": "9.9"}, "tiny, lr 1", found, loss_curves.FP8_CURVES
    )
    row = table("fp8-parity imaginary", tmp_path).splitlines()[2]
    assert row.endswith("| +0.125 ± 0.051 over 4 starts | 0.408 |")

"""A training run in the report: its curve, its worth beside baselines, its samples."""

import json

from tilestack.data.baseline import Baselines
from tilestack.lab.report.page import colour
from tilestack.lab.report.training_run import measure_baselines, speed, training_section
from tilestack.train import Recipe, metrics
from tilestack.train.settings import read


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_section_shows_the_run(tmp_path):
    steps = [{"step": n, "loss": 5.0 / n} for n in range(1, 101)]
    write_rows(tmp_path / metrics.METRICS, [*steps, {"step": 100, "validation_loss": 0.5}])
    write_rows(
        tmp_path / metrics.SPEED,
        [{"step": n, "tokens_per_s": rate} for n, rate in ((50, 10.0), (60, 4000.0), (70, 5000.0))],
    )
    found = training_section(tmp_path, {"bits_per_byte": 1.25}, Baselines(2.0, 1.5, 1.75), [("def main(", "): <b>")])
    assert "5.00 → 0.05" in found.body
    assert "0.50</b><span>loss of held-out text" in found.body
    assert ">1.250</b>" in found.body
    assert "4,000" in found.body
    assert "<b>def main(</b>): &lt;b&gt;" in found.body
    bars = json.loads(
        found.body.split('aria-label="bits a byte"')[1].split('application/json">')[1].split("</script>")[0]
    )
    (bar,) = bars["data"]
    assert dict(zip(bar["y"], bar["x"], strict=True)) == {
        "this model": 1.25,
        "zlib -9": 2.0,
        "lzma": 1.5,
        "5-gram counts": 1.75,
    }
    assert bar["marker"]["color"][-1] == colour("good")
    assert speed(tmp_path) == 4000.0


def test_the_headline_is_not_the_luck_of_the_last_step(tmp_path):
    steps = [{"step": n, "loss": 4.0} for n in range(1, 100)]
    write_rows(tmp_path / metrics.METRICS, [*steps, {"step": 100, "loss": 1.0}])
    found = training_section(tmp_path, {"bits_per_byte": 1.0}, Baselines(2.0, 1.5, 1.75), [])
    assert "4.00 → 1.00" not in found.body


def test_a_model_that_loses_to_counting_says_so(tmp_path):
    write_rows(tmp_path / metrics.METRICS, [{"step": 1, "loss": 5.0}])
    found = training_section(tmp_path, {"bits_per_byte": 3.0}, Baselines(2.0, 1.5, 1.75), [])
    assert "<b class=bad>3.000</b>" in found.body


def test_baselines_are_of_the_documents_that_were_held_out(tmp_path):
    texts = [f"value_{n} = {n * n}\n" * 20 for n in range(40)]
    write_rows(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    settings = {"corpus": "files", "files": [str(tmp_path / "text.jsonl")], "vocabulary": 280, "validation": 0.25}
    found = measure_baselines(read(Recipe, {"data": settings}), tmp_path / "run")
    assert 0 < found.zlib < 8
    assert 0 < found.five_gram < 8

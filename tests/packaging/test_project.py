"""What the project promises in several places is the same in all of them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import tilestack
from tilestack.lab.doctor import EXTRAS, TESTED
from tilestack.lab.results import read_json
from tilestack.lab.tables.generated import OPENING, pages

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/test.yml").read_text())


def minors(low: tuple[int, int], high: tuple[int, int]) -> list[str]:
    return [f"{low[0]}.{minor}" for minor in range(low[1], high[1] + 1)]


def test_doctor_knows_every_extra_and_what_an_extra_installs_is_used():
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS) == set(extras)
    files = [
        path for path in (REPOSITORY / "tilestack").rglob("*.py") if path.name != "machine.py"
    ]  # the doctor itself
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    packages = [re.match(r"[\w-]+", line)[0] for extra, lines in extras.items() if extra != "dev" for line in lines]
    assert [name for name in packages if not re.search(rf"\b{name.replace('-', '_')}\b", sources)] == []


def test_versions_of_torch_and_triton_are_bounded_at_what_was_tested():
    for package, (oldest, newest) in TESTED.items():
        (line,) = [line for line in PROJECT["dependencies"] if re.match(rf"{package}\b", line)]
        assert line.startswith(f"{package}>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}")


def test_the_workflow_runs_every_python_and_both_ends_that_are_promised():
    low, high = re.match(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    jobs = WORKFLOW["jobs"]
    assert jobs["python"]["strategy"]["matrix"]["python"] == minors((3, int(low)), (3, int(high) - 1))
    ends = jobs["ends"]["strategy"]["matrix"]["include"]
    for package, bounds in TESTED.items():
        assert [tuple(map(int, end[package].split(".")[:2])) for end in ends] == list(bounds)
    assert all(any(step.get("run") == "make test" for step in jobs[name]["steps"]) for name in ("python", "ends"))


def test_pre_commit_runs_the_linters_of_make_lint():
    makefile = (REPOSITORY / "Makefile").read_text()
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    tools = {re.match(r"\t\$\(BIN\)/([\w-]+)", line)[1] for line in lint.splitlines()}
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {re.match(r"\.venv/bin/([\w-]+)", hook["entry"])[1] for hook in hooks} == tools


# What fills each kind of generated table: on a GPU, and on a CPU.
KERNELS = "tilestack bench all --save"
MUTATION = "python -m tests.mutation"  # which needs neither
FILLED_BY = {
    **dict.fromkeys(("headline", "operator", "ladder", "layers", "training", "roofs", "memory"), (KERNELS, None)),
    **dict.fromkeys(("serving", "summary"), (KERNELS, "tilestack bench serve --device cpu --save")),
    "http": (KERNELS, "tilestack bench http --device cpu --save"),
    "quantised": (None, "tilestack bench quantize --device cpu --save"),
    "recipes": ("tilestack chain --save", "tilestack chain --save"),
    "alignment": (None, "tilestack chain --alignment --save"),
    "parity": ("tilestack parity --save", None),
    "fp8-parity": (None, "tilestack parity --fp8 --device cpu --save"),
    "profiles": ("tilestack profile --recipe qwen3-0.6b --save", None),
    "proofs": ("tilestack verify --device cuda --stale --save", None),
    **dict.fromkeys(("mutation", "survivors"), (MUTATION, MUTATION)),
}


def test_two_commands_make_every_figure_that_is_shown():
    dry = lambda *targets: subprocess.run(["make", "--dry-run", *targets], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout  # fmt: skip
    on_gpu, on_cpu = dry("bench", "prove") + MUTATION, dry("bench-cpu") + MUTATION
    shown = {name for page in pages(REPOSITORY) for name in OPENING.findall(page.read_text(encoding="utf-8"))}
    assert {name.split()[0] for name in shown} == set(FILLED_BY)
    for name in shown:
        kind, machine = (*name.split(), "")[:2]
        commands, of = (on_cpu, 1) if machine == "cpu" else (on_gpu, 0)
        assert FILLED_BY[kind][of] in commands, f"nothing makes the figures of {name}"


def test_every_model_of_the_tables_of_serving_is_measured_by_one_command():
    commands = subprocess.run(["make", "--dry-run", "bench-cpu"], cwd=REPOSITORY, capture_output=True, text=True).stdout
    rows = read_json(REPOSITORY / "results" / "cpu" / "http.json")["rows"]
    for model in {row["case"].partition(",")[0] for row in rows} - {"random weights"}:
        assert f"bench http --device cpu --model {model} --save" in commands


def test_the_citation_names_the_version():
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == tilestack.__version__


def test_the_changelog_has_dated_notes_for_the_version():
    """What `make release` asks for before anything else."""
    notes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(tilestack.__version__)}\] - \d{{4}}-\d\d-\d\d$", notes, re.MULTILINE)


@pytest.fixture
def checkout(tmp_path):
    """A repository with a Makefile and nothing to build: `make release` ends at what it asks for, or at its tests."""
    for name in ("Makefile", "CHANGELOG.md", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "Makefile").write_text(
        (tmp_path / "Makefile").read_text().replace("$(MAKE) test gates dist", "@echo and now the tests; exit 1")
    )
    (tmp_path / ".gitignore").write_text(".venv\n")
    (tmp_path / ".venv").mkdir()
    ready = tmp_path / ".venv/ready"
    ready.touch()
    os.utime(ready, times=(2**32, 2**32))
    git = lambda *words: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)  # fmt: skip
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    return tmp_path, git


def test_a_release_asks_for_notes_a_new_version_and_a_clean_checkout(checkout):
    folder, git = checkout

    def release() -> str:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        command = ["make", "release", f"BIN={Path(sys.executable).parent}"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode != 0
        return done.stdout

    assert "and now the tests" in release()
    (folder / "more.txt").touch()
    assert "there are uncommitted changes" in release()
    git("tag", f"v{tilestack.__version__}")
    assert f"v{tilestack.__version__} is a tag already" in release()
    (folder / "CHANGELOG.md").write_text("## [Unreleased]\n")
    assert f"CHANGELOG.md has no notes for {tilestack.__version__}" in release()

"""A stranger with the wheel: built from the sdist, installed into an environment of its own, run from an empty folder.

The environment shares the large packages of this one through a path file, so that nothing is downloaded; tilestack itself
is only there as the wheel.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
TINY = [
    "run.steps=2", "schedule.warmup=1", "data.batch=2", "data.sequence=32", "data.vocabulary=300", "evaluation.batches=1",
    "evaluation.sample_tokens=2", "model.config.hidden_size=16", "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=1", "model.config.head_dim=8",
]  # fmt: skip
TINY_TEXT = ["data.most_bytes=400000", "data.validation=0.3"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist of the checkout, and a wheel made from that sdist; TILESTACK_DIST names one that is to be
    published."""
    if published := os.environ.get("TILESTACK_DIST"):
        return REPOSITORY / published
    source, out = tmp_path_factory.mktemp("source") / "tilestack", tmp_path_factory.mktemp("dist")
    shutil.copytree(REPOSITORY, source, ignore=LEFT_OUT)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory) -> Path:
    """An environment with the wheel; answers its folder of commands."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join(shared) + "\n")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--no-index", str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("desk")


def variables() -> dict[str, str]:
    """The environment's variables, without those that tests set."""
    hidden = ("PYTHONPATH", "TRITON_INTERPRET", "TILESTACK_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"
    }  # fmt: skip


@pytest.fixture
def tilestack(environment, desk):
    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [environment / "tilestack", *arguments], cwd=desk, env=variables(), capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def serve(environment, desk):
    """Starts a server on a free port and answers its address; it is told to end by Ctrl-C, and must do so in peace."""
    started = []

    def run(*arguments: str) -> str:
        command = [environment / "tilestack", "serve", *arguments, "--port", "0"]
        server = subprocess.Popen(
            command, cwd=desk, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        started.append(server)
        said = []
        for line in server.stdout:
            said.append(line)
            if address := re.search(r" on (http://127\.0\.0\.1:\d+):", line):
                return address[1]
        raise AssertionError("".join(said))

    yield run
    for server in started:
        server.send_signal(signal.SIGINT)
        assert "Traceback" not in server.communicate(timeout=300)[0]


def changes(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_wheel_and_sdist_carry_what_the_commands_need(built):
    names = zipfile.ZipFile(next(built.glob("*.whl"))).namelist()
    for path in (*(REPOSITORY / "recipes").glob("*.toml"), *(REPOSITORY / "results").glob("**/*.json")):
        assert f"tilestack/{path.relative_to(REPOSITORY)}" in names
    pages = {"tilestack/lab/report/report.html", "tilestack/lab/tiles/page.html"}
    assert {*pages, "tilestack/py.typed", "tilestack/ops/__init__.pyi"} <= set(names)
    compiled_on_first_use = "cuda/add.cu", "cuda/common.cuh", "cpu/decode_step.cpp", "cpu/decoder.h"
    assert {f"tilestack/kernels/{source}" for source in compiled_on_first_use} <= set(names)
    assert any(name.startswith("tilestack/tuning/tables/") for name in names)
    assert not [name for name in names if name.startswith("tests") or name.endswith(".md")]
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "tests/conftest.py"} <= packed
    assert {".github/workflows/test.yml", ".pre-commit-config.yaml"} <= packed  # which its tests read


def test_the_readme_from_an_empty_folder(tilestack, serve, environment, desk):
    """Every command of README's shell blocks, with settings that make the training short."""
    site = next(environment.parent.glob("lib/python3*/site-packages/tilestack"))
    before = files_of(site)
    blocks = re.findall(r"^```sh\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0] for block in blocks for line in block.splitlines() if line.startswith("tilestack ")]
    commands = [shlex.split(command)[1:] for line in lines for command in line.split("&&")]
    held_out = desk.parent / "held-out.txt"
    held_out.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 4)
    shorter = {
        "quantize": ["--samples", "1", "--length", "16", "--evaluate", str(held_out)],
        "train": changes(*TINY, *TINY_TEXT),
        "sft": changes(*TINY, "data.sequence=128"),
        "grpo": changes("run.steps=2", "schedule.warmup=1", "data.batch=2", "evaluation.batches=1", "evaluation.sample_tokens=2", "grpo.max_new_tokens=2"),
        "parity": ["--steps", "1"],
        "demo": changes(*TINY, *TINY_TEXT),
        "generate": ["--max-tokens", "2"],
        "load": ["--requests", "2", "--input", "8", "--output", "2", "--warmup", "0"],
    }  # fmt: skip
    assert {"generate", "serve", "load", "train", "sft", "grpo", "parity", "report"} <= {
        command[0] for command in commands
    }
    for name, *rest in commands:
        if name == "chat":
            continue  # needs a person
        if name == "serve":
            shorter["load"].insert(0, serve(*rest))
            continue
        tilestack(name, *rest, *shorter.get(name, []))
    assert {path.name for path in desk.iterdir()} == {"runs", "smollm2-w4", "smollm2.gguf"}
    assert (desk / "runs/python/model/model.safetensors").is_file()
    assert "<h2>On NVIDIA H200</h2>" in (desk / "runs/report.html").read_text()
    assert files_of(site) == before


def test_the_demo_runs_whole_and_what_it_made_can_be_used(tilestack, desk):
    others = files_of(desk / "runs")
    told = tilestack("demo", *changes(*TINY, *TINY_TEXT)).stdout
    page = (desk / "runs/demo/report.html").read_text()
    assert "<h2>On NVIDIA H200</h2>" in page
    assert 'id="this-machine-a-model-trained-here"' in page
    assert 'id="on-nvidia-h200-proved-on-h200"' in page
    hint = shlex.split(re.search(r"talk to the model: tilestack (.*)", told)[1])
    assert "2 tokens" in tilestack(*hint, "--max-tokens", "2").stderr
    assert {name for name in files_of(desk / "runs") if not name.startswith("demo/")} == others


def test_what_is_not_there_is_said_with_what_is(tilestack):
    assert "Did you mean demo? tilestack comes with demo, " in tilestack("train", "demmo", code=1).stderr
    assert "installed from a wheel" in tilestack("report", "--tables", code=1).stderr


def test_the_doctor_names_packages_that_can_be_installed(tilestack):
    found = {finding["what"]: finding for finding in json.loads(tilestack("doctor", "--json").stdout)}
    advice = [finding["fix"] for what, finding in found.items() if what.startswith("extra ") and finding["fix"]]
    assert advice
    assert "extra dev" not in found
    assert all(re.match(r"pip install '", fix) and "tilestack" not in fix for fix in advice)

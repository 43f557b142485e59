"""Tables of what is kept beside the contests: memory sweeps, loss curves, chains of recipes, quantised models."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilestack.lab.bench import memory_sweeps, quantised_models
from tilestack.lab.contests import method
from tilestack.lab.results import machine_name, path_of, read_json
from tilestack.lab.stale import run_is_current
from tilestack.lab.tables.markdown import OLD, OLDER, commits_in_words, markdown, not_measured
from tilestack.lab.training import chain, loss_curves
from tilestack.lab.units import percent


def sweep(folder: Path, slug: str, name: str) -> str:
    """One sweep over access patterns: the bandwidth of each candidate, and ours as a part of the copy roof."""
    if (run := memory_sweeps.load_sweeps(folder, slug)) is None:
        return not_measured(memory_sweeps.COMMAND, gpu=slug)
    points = [point for point in memory_sweeps.points_of(run) if point.sweep == name and point.tb_per_s is not None]
    backends = list(dict.fromkeys(point.backend for point in points))
    found = {(point.setting, point.backend): point.tb_per_s for point in points}
    roof = run["roofs"].get("copy_tb_per_s")
    rows = []
    for setting in dict.fromkeys(point.setting for point in points):
        rates = [found.get((setting, backend)) for backend in backends]
        share = rates[0] / roof if rates[0] and roof else None
        rows.append([str(setting), *map(memory_sweeps.rate_in_words, rates), percent(share)])
    if not rows:
        return not_measured(memory_sweeps.COMMAND, gpu=slug)
    machine = run["machine"]
    versions = ", ".join(f"{key} {machine[key]}" for key in ("torch", "triton", "commit"))
    how = method([{"how": point.how} for point in points])
    header = [memory_sweeps.sweep_named(name).axis, *backends, f"{backends[0]}, of the roof"]
    stamp = f"_Measured on {machine_name(machine)}, {versions}, {machine['date'][:10]}, {how}._"
    old = "" if memory_sweeps.sweeps_are_current(run) else f"\n\n_{OLD} {OLDER}at commit {machine['commit']}._"
    return markdown(header, rows, left=0) + "\n\n" + stamp + old


def parity(folder: Path, slug: str) -> str:
    """How far the losses of a training run part from those on the definitions, by what was swapped."""
    path = path_of(slug, loss_curves.CURVES, folder)
    if not path.exists():
        return not_measured("tilestack parity --save", gpu=slug)
    kept = read_json(path)
    rows = [
        [marked(run, run["name"]), f"{run['reference'][0]:.2f} → {run['reference'][-1]:.2f}", f"{loss_curves.largest_difference(run):.4f}", percent(run["worst"])]
        for run in kept["runs"]
    ]  # fmt: skip
    machine = kept["machine"]
    commits = commits_in_words(run.get("commit", machine["commit"]) for run in kept["runs"])
    header = ["swapped", "loss on the definitions", "largest difference", "of what is allowed"]
    stamp = f"_{kept['model']}; {machine['gpu']}, {commits}, {machine['date'][:10]}._"
    return f"{markdown(header, rows)}\n\n{stamp}{older_runs(kept['runs'])}"


def fp8_parity(folder: Path, slug: str) -> str:
    """How the loss of training in fp8 ends beside that of the same recipe in its own precision."""
    path = path_of(slug, loss_curves.FP8_CURVES, folder)
    if not path.exists():
        return not_measured("tilestack parity --fp8 --save", machine=slug)
    kept = read_json(path)
    rows = [
        [marked(run, run["name"]), *(f"{loss_curves.mean_of_last_tenth(run[way]):.3f}" for way in ("reference", "candidate")), f"{loss_curves.largest_difference(run):.3f}", percent(run["worst"]), *loss_curves.gap_over_starts(run.get("ends", []))]
        for run in kept["runs"]
    ]  # fmt: skip
    header = [
        "trained",
        "loss, mean of the last tenth",
        "in fp8",
        "largest difference",
        "of what is allowed",
        "fp8 above, mean and its error",
        "spread without fp8",
    ]
    return f"{markdown(header, rows)}\n\n_{run_stamp(kept['machine'], kept['runs'])}._{older_runs(kept['runs'])}"


def recipes(folder: Path, slug: str) -> str:
    """The recipes one after another: how long each took, and its figures when first and last measured."""
    path = path_of(slug, chain.CHAIN, folder)
    if not path.exists():
        return not_measured("tilestack chain --save", machine=slug)
    kept = read_json(path)
    rows = [
        [marked(stage, f"`{stage['command']} {stage['recipe']}`"), chain.figures_in_words(stage["figures"]), f"{stage['parameters'] / 1e6:.2f} M", f"{stage['steps']:,}", chain.speed_in_words(stage.get("speed", {})), f"{stage['seconds']:.0f} s"]
        for stage in kept["stages"]
    ]  # fmt: skip
    asked = "; ".join(f"“{each['prompt']}” “{each['answer']}” ({'right' if each['right'] else 'wrong'})" for each in kept["answers"])  # fmt: skip
    header = ["command", "first evaluation → last", "parameters", "steps", "mean speed", "all of it took"]
    return f"{markdown(header, rows, left=2)}\n\n_Asked at the end: {asked}. {run_stamp(kept['machine'], kept['stages'])}._{older_runs(kept['stages'])}"


def alignment(folder: Path, slug: str) -> str:
    """The recipes of alignment from the model of their own: what each changed, and what it cost."""
    path = path_of(slug, chain.ALIGNMENT, folder)
    if not path.exists():
        return not_measured("tilestack chain --alignment --save", machine=slug)
    kept = read_json(path)
    rows = [
        [marked(stage, f"`{' '.join([stage['command'], stage['recipe'], *(f'--set {setting}' for setting in stage['settings'])])}`"), chain.figures_in_words(stage["figures"]), f"{stage['parameters'] / 1e3:.0f} k", f"{stage['steps']:,}", f"{stage['processor_seconds']:.0f} s"]
        for stage in kept["stages"]
    ]  # fmt: skip
    header = ["command", "before → after, held out", "parameters", "steps", "processor time"]
    stamp = f"_{run_stamp(kept['machine'], kept['stages'])}._"
    return f"{markdown(header, rows, left=2)}\n\n{stamp}{older_runs(kept['stages'])}"


def quantised(folder: Path, slug: str) -> str:
    """Every scheme and method on one model, the default of a scheme in bold."""
    path = path_of(slug, quantised_models.RESULTS, folder)
    if not path.exists():
        return not_measured(quantised_models.COMMAND)
    kept = read_json(path)
    rows = []
    for run in kept["runs"]:
        scheme, method, *figures = quantised_models.cells(run)
        rows.append([marked(run, f"`{scheme}`"), f"**{method}**" if run["default"] else method, *figures])
    first = kept["runs"][0]
    before, calibration = first["quality"]["before"], first["calibration"]
    about = (
        f"{first['model']}, {first['size']['before']['bytes'] / 1e6:.0f} MB and {before['bits_per_byte']['value']:.4f} bits per "
        f"byte before; calibrated on {calibration['samples']} rows of {calibration['length']} built-in tokens, compared on "
        f"{before['tokens']:,} held-out ones of {before['documents']} documents; ± standard error. "
        f"{run_stamp(kept['machine'], kept['runs'])}"
    )
    return f"{markdown(list(quantised_models.HEADER), rows, left=2)}\n\n_{about}._{older_runs(kept['runs'])}"


def marked(run: dict[str, Any], name: str) -> str:
    """A run's name, with a dagger where it is of an older source."""
    return name if run_is_current(run) else f"{name} {OLD}"


def older_runs(runs: Iterable[dict[str, Any]]) -> str:
    """The line that says what the dagger means, where there is one; the commits stand above it."""
    return "" if all(map(run_is_current, runs)) else f"\n\n_{OLD} {OLDER.removesuffix('; ')}._"


def run_stamp(machine: dict[str, Any], runs: Iterable[dict[str, Any]]) -> str:
    """Where, with what and at which commits something was run."""
    commits = commits_in_words(run.get("commit") or machine["commit"] for run in runs)
    return f"{machine_name(machine)}, torch {machine['torch']}, {commits}, {machine['date'][:10]}"

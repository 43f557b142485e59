"""Markdown tables generated from results/: what README and docs claim is what was measured.

A table stands between two markers and is rewritten in place by `make docs`:

    <!-- table: summary h200 cpu softmax,linear -->   the README's: some operators, training and serving, a line per group
    <!-- table: headline h200 -->                     one line per operator, its best case; of some with their names
    <!-- table: operator h200 softmax,rms_norm -->    every case of some operators, both directions, and their means
    <!-- table: ladder h200 linear triton,aten -->    some backends of an operator side by side, a line per case
    <!-- table: layers h200 -->                       a decoder's layers alone, ours and every peer's
    <!-- table: training h200 -->                     whole training steps, ours and every peer's
    <!-- table: roofs h200 -->                        what the machine can do at best
    <!-- table: memory h200 stride -->                one sweep of `tilestack bench memory`, a line per setting
    <!-- table: parity h200 -->                       losses of training on kernels and on definitions
    <!-- table: serving h200 -->                      engines on the workloads of `tilestack bench serve`
    <!-- table: http cpu -->                          what HTTP costs of the engine's throughput, of `tilestack bench http`
    <!-- table: recipes cpu -->                       what `tilestack chain` came to, recipe by recipe
    <!-- table: alignment cpu -->                     what the recipes of alignment came to from a model of their own
    <!-- table: quantised cpu -->                     the quality of quantised weights, of `tilestack bench quantize`
    <!-- table: proofs h200 -->                       which backends are proved there, of the present source
    <!-- table: mutation -->                          how many mutants of the kernels the proofs catch, by family
    <!-- table: survivors -->                         the mutants that they do not, each with the reason
    <!-- /table -->

A loss is written like a win, in words, and what was measured on an older source has a dagger. A table without results
says "not measured yet".
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tilestack.lab.bench import memory_sweeps
from tilestack.lab.bench.peers import is_peer
from tilestack.lab.bench.quantised_models import quantised
from tilestack.lab.contests import Contest, Means, contests, means, method, rate, results_under, score
from tilestack.lab.mutation import results as mutation_results
from tilestack.lab.proof.proofs import COMMAND
from tilestack.lab.proof.proved import standings
from tilestack.lab.results import read_json
from tilestack.lab.rows import EQUAL, FASTER, SAME_KERNEL, SLOWER, UNCLEAR
from tilestack.lab.stale import LAYER, TRAINING, is_current
from tilestack.lab.tables.markdown import OLD, OLDER, commits_in_words, daggers, markdown
from tilestack.lab.tables.serving import http, serving
from tilestack.lab.tables.summary import summary
from tilestack.lab.training import chain, loss_curves
from tilestack.lab.training.bench_layers import CANDIDATES as OF_LAYERS
from tilestack.lab.training.bench_train import CANDIDATES
from tilestack.lab.units import microseconds, percent, times

NO_QUALITY = ["–", "–"]
VERSIONS = {"torch": "torch", "Triton": "triton", "cuDNN": "cudnn", "Liger": "liger", "transformers": "transformers"}


class TableError(ValueError):
    """A marker that names no table; the message says where and what there is."""


def against_peer(contest: Contest) -> str:
    """The ratio and the peer's name, with a loss, a draw or a borrowed kernel said in words."""
    if contest.ratio is None or contest.peer is None:
        return "no peer" if contest.ours else "–"
    shown, peer = times(contest.ratio), contest.peer["backend"]
    return {
        FASTER: f"**{shown}** {peer}",
        SLOWER: f"{shown} (slower than {peer})",
        EQUAL: f"{shown} (equal to {peer})",
        UNCLEAR: f"{shown} (unclear against {peer}: the rounds differ too much)",
        SAME_KERNEL: f"{shown} {peer} (no win: this is {contest.borrowed}'s kernel)",
    }[contest.verdict]


def quality(row: dict[str, Any]) -> list[str]:
    """What quantising costs (quality.py): cells of a table, dashes where a row says nothing of it."""
    if row.get("cosine") is None:
        return NO_QUALITY
    return [f"{row['cosine']:.5f}", f"{row['relative_error']:.2%}"]


def marked(name: str, chosen: Iterable[Contest]) -> str:
    """A name, with a dagger where a figure beside it was measured on an older source."""
    return f"{name} {OLD}" if any(contest.stale for contest in chosen) else name


def older(chosen: Iterable[Contest]) -> str:
    """The line that says what the daggers mean, and at which commit what they mark was measured."""
    return daggers((contest.commit, f"`{contest.op}`") for contest in chosen if contest.stale)


def stamps(chosen: list[Contest]) -> str:
    """The line under a table: where, with what, when and how it was measured."""
    lines = []
    for run in {id(contest.run): contest.run for contest in chosen}.values():
        machine = run.machine
        rows = [row for contest in chosen if contest.run is run for row in contest.timed]
        commits = [row.get("commit") or machine.get("commit") or "" for row in rows]
        known = [
            machine.get("gpu") or machine.get("cpu") or run.slug,
            *(f"{label} {machine[key]}" for label, key in VERSIONS.items() if machine.get(key)),
            commits_in_words(commits) if any(commits) else "",
            str(machine.get("date", ""))[:10],
            method(rows),
        ]  # fmt: skip
        lines.append(", ".join(filter(None, known)))
    return "_Measured on " + "; ".join(sorted(lines)) + "._"


def headline(found: list[Contest], names: str = "") -> str:
    """One line per operator, or per named one: the case closest to its roof, forward where it was timed, and how many
    cases are won."""
    rows, used = [], []
    for op in (
        names.split(",")
        if names
        else dict.fromkeys(contest.op for contest in found if contest.op not in (LAYER, TRAINING))
    ):
        ours = [contest for contest in found if contest.op == op and contest.ours]
        if not ours:
            continue
        first = [contest for contest in ours if contest.direction == "forward"] or ours
        best = max(first, key=lambda contest: contest.ours["roof_fraction"] or 0)  # type: ignore[index]
        row = best.ours
        assert row is not None
        rows.append([marked(f"`{op}`", ours), f"{best.label}, {best.dtype} {best.direction}", microseconds(row["time_us"]), rate(best, row), percent(row["roof_fraction"]), against_peer(best), microseconds(row["host_us"]), str(score(contest.verdict for contest in ours))])  # fmt: skip
        used += ours
    if not rows:
        return ""
    header = ["operator", "best case", "time", "rate", "of the roof", "against the best peer", "host", "cases won"]
    return markdown(header, rows, left=2) + "\n\n" + stamps(used) + older(used)


def operator(found: list[Contest], names: str) -> str:
    """Every case of the named operators."""
    wanted = [name.strip() for name in names.split(",")]
    rows, used = [], []
    for contest in sorted((c for c in found if c.op in wanted), key=lambda c: wanted.index(c.op)):
        if (row := contest.ours) is None:
            continue
        rows.append([marked(f"`{contest.op}`", [contest]), contest.label, contest.dtype, contest.direction, microseconds(row["time_us"]), rate(contest, row), percent(row["roof_fraction"]), against_peer(contest), microseconds(row["host_us"]), *quality(row)])  # fmt: skip
        used.append(contest)
    if not rows:
        return ""
    header = ["operator", "case", "dtype", "direction", "time", "rate", "of the roof", "against the best peer", "host"]
    if all(row[-2:] == NO_QUALITY for row in rows):
        rows = [row[:-2] for row in rows]
    else:
        header += ["cosine", "relative error"]
    summary = means(used)
    named = [*used, *(contest for mean in summary for contest in mean.contests)]
    return markdown(header, rows, left=4) + over_cases(summary) + "\n\n" + stamps(used) + older(named)


def over_cases(found: list[Means]) -> str:
    """What the cases of operators come to against the best peer of each: a line per backend of ours."""
    if not found:
        return ""
    rows = [
        [marked(f"`{mean.op}`", mean.contests), mean.dtype, mean.direction, mean.backend, mean.cases, times(mean.mean), f"{times(mean.worst.ratio)} ({mean.worst.label})"]
        for mean in found
    ]  # fmt: skip
    header = ["operator", "dtype", "direction", "backend", "cases", "geometric mean against the best peer", "least"]
    return "\n\n" + markdown(header, rows, left=4)


def ladder(found: list[Contest], op: str, names: str) -> str:
    """The rates of the named backends side by side, a line for each case that at least two of them were timed on. One
    that was timed on none of those has no column; a line below the table names it."""
    wanted = names.split(",")
    chosen = []
    for contest in (c for c in found if c.op == op):
        by_backend = {row["backend"]: row for row in contest.timed if row["backend"] in wanted}
        if len(by_backend) > 1:
            chosen.append((contest, by_backend))
    if not chosen:
        return ""
    timed = [name for name in wanted if any(name in by_backend for _, by_backend in chosen)]
    rows = []
    for contest, by_backend in chosen:
        rates = [rate(contest, by_backend[name]) if name in by_backend else "–" for name in timed]
        rows.append([marked(contest.label, [contest]), contest.dtype, contest.direction, *rates])
    header = ["case", "dtype", "direction", *(f"`{name}`" for name in timed)]
    untimed = ", ".join(f"`{name}`" for name in wanted if name not in timed)
    note = f"\n\n_Not measured yet: {untimed}._" if untimed else ""
    used = [contest for contest, _ in chosen]
    return markdown(header, rows, left=3) + note + "\n\n" + stamps(used) + older(used)


def layers(found: list[Contest]) -> str:
    """A decoder's layers: a line per layer and direction, the times of all candidates side by side."""
    rows, used = [], [contest for contest in found if contest.op == LAYER]
    names = [name for name in OF_LAYERS if any(row["backend"] == name for contest in used for row in contest.timed)]
    for contest in used:
        by_name = {row["backend"]: row for row in contest.timed}
        cells = [microseconds(by_name[name]["time_us"]) if name in by_name else "–" for name in names]
        roof = percent(contest.ours["roof_fraction"]) if contest.ours else "–"
        rows.append([marked(contest.label, [contest]), contest.dtype, contest.direction, *cells, roof, against_peer(contest)])  # fmt: skip
    if not rows:
        return ""
    header = ["layer, model, micro-batch", "dtype", "direction", *names, "of the roof", "against the best peer"]
    return markdown(header, rows, left=3) + "\n\n" + stamps(used) + older(used)


def training(found: list[Contest]) -> str:
    """Whole training steps: a line per candidate, fastest first, then those that failed and those that were not tried."""
    rows, used = [], [contest for contest in found if contest.op == TRAINING]
    is_old = lambda row: not is_peer(row["backend"]) and not is_current(row)
    for contest in used:
        case = contest.label
        for row in contest.timed:
            name = f"**{row['backend']}**" if row is contest.ours else row["backend"]
            name += f" {OLD}" if is_old(row) else ""
            ratio = "–" if row["ratio_to_best_peer"] is None else times(row["ratio_to_best_peer"])
            ratio += f" ({contest.verdict})" if row is contest.ours and contest.verdict in (EQUAL, UNCLEAR) else ""
            losses = [row.get(key) for key in ("first_loss", "last_loss")]
            loss = " → ".join(f"{value:.3f}" for value in losses) if None not in losses else "not recorded"
            peak = f"{row['peak_mib'] / 1024:.1f} GiB" if row["peak_mib"] else "–"
            rows.append([case, name, f"{row['tokens_per_s']:,.0f}", f"{row['time_us'] / 1e3:.1f} ms", peak, loss, ratio])  # fmt: skip
        failed = [row for row in contest.rows if not row["time_us"]]
        rows += [[case, row["backend"], row["note"].replace("|", "/"), "–", "–", "–", "–"] for row in failed]
        tried = {row["backend"] for row in contest.rows} | {
            name for row in contest.rows for name in row.get("tried", ())
        }
        if untried := [name for name in CANDIDATES if name not in tried]:
            rows.append([case, f"not tried: {', '.join(untried)}", "–", "–", "–", "–", "–"])
    if not rows:
        return ""
    header = ["model, micro-batch", "trained by", "tokens/s", "step", "peak memory", "loss, first to last step", "against the best peer"]  # fmt: skip
    old = daggers((row["commit"], contest.label) for contest in used for row in contest.timed if is_old(row))
    return markdown(header, rows, left=2) + "\n\n" + stamps(used) + old


def roofs(found: list[Contest]) -> str:
    """What the machine can do at best, as its last run measured it."""
    if not found:
        return ""
    run = max((contest.run for contest in found), key=lambda run: run.machine.get("date", ""))
    rows = [["copy, read and written", f"{run.bandwidth:.2f} TB/s"]] if run.bandwidth else []
    rows += [[f"matrix product in {dtype}", f"{value:.0f} TFLOP/s"] for dtype, value in run.rates.items()]
    if floor := run.roofs.get("host_floor_us"):
        rows.append(["host time of a trivial PyTorch call", microseconds(floor)])
    known = [run.machine.get(key) for key in ("gpu", "commit", "date")]
    return markdown(["roof", "measured"], rows) + f"\n\n_Measured on {', '.join(str(fact) for fact in known if fact)}._"


def sweep(folder: Path, slug: str, name: str) -> str:
    """One sweep over access patterns: the bandwidth of each candidate, and ours as a part of the copy roof."""
    if (run := memory_sweeps.load_sweeps(folder, slug)) is None:
        return ""
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
        return ""
    machine = run["machine"]
    versions = ", ".join(f"{key} {machine[key]}" for key in ("torch", "triton", "commit"))
    how = method([{"how": point.how} for point in points])
    header = [memory_sweeps.named(name).axis, *backends, f"{backends[0]}, of the roof"]
    stamp = f"_Measured on {machine['gpu'] or machine['cpu']}, {versions}, {machine['date'][:10]}, {how}._"
    old = "" if memory_sweeps.sweeps_are_current(run) else f"\n\n_{OLD} {OLDER}at commit {machine['commit']}._"
    return markdown(header, rows, left=0) + "\n\n" + stamp + old


def parity(folder: Path, slug: str) -> str:
    """How far the losses of a training run part from those on the definitions, by what was swapped."""
    path = loss_curves.curves_file(folder, slug)
    if not path.exists():
        return f"_not measured yet: `tilestack parity --save` on a machine with the GPU `{slug}` fills this table._"
    kept = read_json(path)
    rows = [
        [run["name"], f"{run['reference'][0]:.2f} → {run['reference'][-1]:.2f}", f"{loss_curves.largest_difference(run):.4f}", percent(run["worst"])]
        for run in kept["runs"]
    ]  # fmt: skip
    machine = kept["machine"]
    commits = commits_in_words(run.get("commit", machine["commit"]) for run in kept["runs"])
    header = ["swapped", "loss on the definitions", "largest difference", "of what is allowed"]
    return markdown(header, rows) + f"\n\n_{kept['model']}; {machine['gpu']}, {commits}, {machine['date'][:10]}._"


def fp8_parity(folder: Path, slug: str) -> str:
    """How the loss of training in fp8 ends beside that of the same recipe in its own precision."""
    path = loss_curves.curves_file(folder, slug, "fp8")
    if not path.exists():
        return f"_not measured yet: `tilestack parity --fp8 --save` on the machine `{slug}` fills this table._"
    kept = read_json(path)
    rows = [
        [run["name"], *(f"{loss_curves.mean_of_last_tenth(run[way]):.3f}" for way in ("reference", "candidate")), f"{loss_curves.largest_difference(run):.3f}", percent(run["worst"]), *loss_curves.gap_over_starts(run.get("ends", []))]
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
    return f"{markdown(header, rows)}\n\n_{run_stamp(kept['machine'], kept['runs'])}._"


def recipes(folder: Path, slug: str) -> str:
    """The recipes one after another: how long each took, and its figures when first and last measured."""
    path = chain.chain_file(folder, slug)
    if not path.exists():
        return f"_not measured yet: `tilestack chain --save` on the machine `{slug}` fills this table._"
    kept = read_json(path)
    rows = [
        [f"`{stage['command']} {stage['recipe']}`", chain.figures_in_words(stage["figures"]), f"{stage['parameters'] / 1e6:.2f} M", f"{stage['steps']:,}", chain.speed_in_words(stage.get("speed", {})), f"{stage['seconds']:.0f} s"]
        for stage in kept["stages"]
    ]  # fmt: skip
    asked = "; ".join(f"“{each['prompt']}” “{each['answer']}” ({'right' if each['right'] else 'wrong'})" for each in kept["answers"])  # fmt: skip
    header = ["command", "first evaluation → last", "parameters", "steps", "mean speed", "all of it took"]
    return f"{markdown(header, rows, left=2)}\n\n_Asked at the end: {asked}. {run_stamp(kept['machine'], kept['stages'])}._"


def alignment(folder: Path, slug: str) -> str:
    """The recipes of alignment from the model of their own: what each changed, and what it cost."""
    path = chain.chain_file(folder, slug, "alignment")
    if not path.exists():
        return f"_not measured yet: `tilestack chain --alignment --save` on the machine `{slug}` fills this table._"
    kept = read_json(path)
    rows = [
        [f"`{' '.join([stage['command'], stage['recipe'], *(f'--set {setting}' for setting in stage['settings'])])}`", chain.figures_in_words(stage["figures"]), f"{stage['parameters'] / 1e3:.0f} k", f"{stage['steps']:,}", f"{stage['processor_seconds']:.0f} s"]
        for stage in kept["stages"]
    ]  # fmt: skip
    header = ["command", "before → after, held out", "parameters", "steps", "processor time"]
    return f"{markdown(header, rows, left=2)}\n\n_{run_stamp(kept['machine'], kept['stages'])}._"


def run_stamp(machine: dict[str, Any], runs: Iterable[dict[str, Any]]) -> str:
    """Where, with what and at which commits something was run."""
    commits = commits_in_words(run.get("commit") or machine["commit"] for run in runs)
    return f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {commits}, {machine['date'][:10]}"


def proofs(folder: Path, slug: str) -> str:
    """A line per backend of ours: what is proved of it on a GPU, and whether of the present source."""
    found = standings(folder, slug)
    if not any(each.claims for each in found):
        return f"_no proofs were kept yet: `{COMMAND}` on a machine with the GPU `{slug}` fills this table._"
    listed = lambda words: ", ".join(words) or "–"
    rows = [
        [f"`{each.op}`", each.backend, each.status, listed(each.dtypes), listed(each.directions), f"{each.claims:,}", percent(each.worst)]
        for each in found
    ]  # fmt: skip
    header = ["operator", "backend", f"proved on the {slug.upper()}", "dtypes", "directions", "claims", "largest error, of what is allowed"]  # fmt: skip
    return markdown(header, rows, left=5)


def mutation(folder: Path) -> str:
    """A line per family of kernels: how many mutants of its files were tried, and how many the proofs caught."""
    found = mutation_results.families(folder)
    if not found:
        return f"_nothing was tried yet: `{mutation_results.COMMAND}` fills this table._"
    rows = [
        [f"{family.name} {OLD}" if family.stale else family.name, *(f"{count:,}" for count in (len(family.files), family.mutants, family.tried, family.caught, family.equivalent, family.gpu_only, family.holes)), f"{family.share:.1%}" if family.tried else "–"]
        for family in (*found, mutation_results.total(found))
    ]  # fmt: skip
    header = ["family", "files", "mutants", "tried", "caught", "equivalent", "seen on a GPU only", "holes", "caught, of all but the equivalent"]  # fmt: skip
    stale = [file for family in found for file in family.stale]
    unreached = [file for family in found for file in family.unreached]
    commits = commits_in_words(tried.commit for family in found for tried in family.files.values())
    named = lambda files: ", ".join(f"`{file}`" for file in files)
    note = f" Not reachable in the interpreter, so not tried: {named(unreached)}." if unreached else ""
    older = f"\n\n_{OLD} partly of an older version of the code: {named(stale)}._" if stale else ""
    return markdown(header, rows) + f"\n\n_Tried in Triton's interpreter at {commits}.{note}_" + older


def survivors(folder: Path) -> str:
    """Every mutant that lives, and why."""
    known, found = mutation_results.reasons(folder), mutation_results.load_tried(folder)
    rows = [
        [f"`{file}`", f"`{name.partition(' ')[2]}`".replace("|", "\\|"), known.get(name, "**not known yet**")]
        for file, tried in found.items()
        for name in tried.survivors
    ]
    return markdown(["file", "function and change", "why it lives"], rows, left=3) if rows else "_none_"


TABLES: dict[str, Callable[..., str]] = {
    "headline": headline,
    "operator": operator,
    "ladder": ladder,
    "layers": layers,
    "training": training,
    "roofs": roofs,
}
FOLDERS: dict[str, Callable[[Path, str], str]] = {
    "parity": parity,
    "fp8-parity": fp8_parity,
    "recipes": recipes,
    "alignment": alignment,
    "serving": serving,
    "http": http,
    "quantised": quantised,
    "proofs": proofs,
}  # from files of their own
OF_NO_GPU: dict[str, Callable[[Path], str]] = {"mutation": mutation, "survivors": survivors}
WORDS = {
    "headline": (1, 2),
    "operator": (2,),
    "ladder": (3,),
    "layers": (1,),
    "training": (1,),
    "roofs": (1,),
}  # how many follow the name
USES = "`summary GPU CPU NAME,NAME`, `headline GPU [NAME,NAME]`, `operator GPU NAME,NAME`, `ladder GPU NAME BACKEND,BACKEND`, `layers MACHINE`, `training GPU`, `roofs GPU`, `parity GPU`, `fp8-parity MACHINE`, `recipes MACHINE`, `alignment MACHINE`, `serving GPU`, `http MACHINE`, `quantised MACHINE`, `proofs GPU`, `memory GPU SWEEP`, `mutation` and `survivors`"


def table(name: str, root: Path, where: str = "") -> str:
    """The table a marker names, from the results under root."""
    kind, *words = name.split() or [""]
    place = f"{where}: " if where else ""
    if kind == "memory" and len(words) >= 2 and " ".join(words[1:]) in {sweep.name for sweep in memory_sweeps.SWEEPS}:
        written = sweep(root / "results", words[0], " ".join(words[1:]))
        return (
            written
            or f"_not measured yet: `{memory_sweeps.COMMAND}` on a machine with the GPU `{words[0]}` fills this table._"
        )
    if kind == "summary" and len(words) == 3:
        return summary(root / "results", *words)
    if kind in OF_NO_GPU and not words:
        return OF_NO_GPU[kind](root / "results")
    if kind in FOLDERS and len(words) == 1:
        return FOLDERS[kind](root / "results", words[0])
    if kind not in TABLES or len(words) not in WORDS[kind]:
        raise TableError(f"{place}no table is named {name!r}; there are {USES}")
    slug, *names = words
    runs = [run for run in results_under(root / "results") if run.slug == slug]
    written = TABLES[kind](contests(runs), *names)
    part = {"training": "train ", "layers": "layers "}.get(kind, "")
    command = f"tilestack bench {part}--save"
    return written or f"_not measured yet: `{command}` on a machine with the GPU `{slug}` fills this table._"

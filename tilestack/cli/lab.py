"""The laboratory's commands: what is here, is it right, what does the compiler make of it, and the report."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tilestack.cli.common import (
    Backend,
    Device,
    Dtypes,
    JsonFile,
    Load,
    Operators,
    console,
    kernel_device,
    load_files,
    pick_dtypes,
    pick_operators,
    progress_bar,
    prove_all,
    report_page,
    writable_file,
    writable_folder,
    write_json,
    write_text,
)
from tilestack.shipped import checkout, shipped


def add_to(app: typer.Typer) -> None:
    app.command("doctor")(doctor_command)
    app.command("ops")(ops_command)
    app.command("verify")(verify_command)
    app.command("explain")(explain_command)
    app.command("tune")(tune_command)
    app.command("report")(report_command)


def doctor_command(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    build: Annotated[
        bool,
        typer.Option(
            "--build",
            help="First compile the C++ that makes calls cheaper on the host; takes a minute, once.",
        ),
    ] = False,
) -> None:
    """Check this machine: what will run, what will not, and how to fix it."""
    from tilestack.contract.native.build import build_node
    from tilestack.lab.doctor import doctor, render_findings

    if build:
        build_node()
    findings = doctor()
    if json_:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        console.print(render_findings(findings))


def ops_command(
    operators: Operators = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    device: Device = None,
) -> None:
    """List every operator, its backends, and what [bold]auto[/bold] chooses on this machine; with names, their details."""
    place = kernel_device(device)
    from tilestack.lab.catalogue import catalogue, render_operator, render_operators

    chosen = pick_operators(operators)
    if json_:
        print(json.dumps(catalogue(place, chosen), indent=1))
    elif operators:
        for operator in chosen:
            console.print(render_operator(operator, place))
    else:
        console.print(render_operators(catalogue(place, chosen)))


def verify_command(
    operators: Operators = None,
    device: Device = None,
    backend: Backend = None,
    dtype: Dtypes = None,
    quick: Annotated[bool, typer.Option(help="Only plain layouts and values, for a first look.")] = False,
    large: Annotated[bool, typer.Option(help="Also the large shapes that bench measures.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    save: Annotated[bool, typer.Option("--save", help="Save proofs to results/<gpu>/proofs.json.")] = False,
    stale: Annotated[bool, typer.Option("--stale", help="Only what has no up-to-date proof in proofs.json.")] = False,
    budget: Annotated[float | None, typer.Option(min=0, help="Start nothing after this many seconds.", show_default=False)] = None,
    mutate: Annotated[str | None, typer.Option(metavar="OP", help="Instead, mutation testing: break this operator's kernels in small ways and show which mutants are caught.", show_default=False)] = None,
    json_: JsonFile = None,
    load: Load = None,
) -> None:  # fmt: skip
    """Verify implementations against the float64 definition; exit 1 if one is wrong, naming the case.

    [bold]tilestack verify softmax --device cpu --quick[/bold] is a first look, on any machine;
    [bold]tilestack verify add --backend mine --load my_kernels.py[/bold] verifies your own kernel.

    Every backend, case, memory layout, dtype and direction is tested. TILESTACK_BACKEND restricts it to one backend.
    After a change, --stale --save --jobs 8 repeats only invalidated proofs, and --budget spreads that over several runs.
    """
    if mutate is not None:
        return mutate_operator(mutate, json_)
    place = kernel_device(device)
    if save and quick:
        raise ValueError("--save keeps proofs in every variant; leave --quick out")
    from tilestack.lab import machine, results
    from tilestack.lab.proof import proofs
    from tilestack.lab.proof.claims import chosen_backends
    from tilestack.lab.proof.verify import render_proofs
    from tilestack.lab.proof.workers import tasks_for

    load_files(load)
    chosen = pick_operators(operators)
    tasks = tasks_for(
        chosen,
        place,
        only=chosen_backends(chosen, place, backend),
        dtypes=pick_dtypes(dtype),
        kinds=("check", "bench") if large else ("check",),
        every_variant=not quick,
    )
    stamp = machine.stamp(place.type)
    target = results.path_of(stamp["slug"], proofs.NAME)
    if save:
        results.refuse_other_machine(writable_file(target), stamp)
    if stale:
        tasks = proofs.unproved(tasks, proofs.load_proofs(target))
    keep = lambda found: proofs.save_proofs(target, stamp, found)
    found = prove_all(tasks, jobs, load or (), keep if save else None, math.inf if budget is None else budget)
    write_json(json_, [asdict(proof) for proof in found])
    if str(json_) != "-":
        console.print(render_proofs(found, place))
    if any(proof.ok is False for proof in found):
        raise typer.Exit(1)


def mutate_operator(name: str, json_: Path | None) -> None:
    """Mutants of the file in which an operator's kernels lie, and what became of each."""
    kernel_device("cpu")
    import warnings

    from tilestack.lab.mutation import suite as mutation

    (operator,) = pick_operators([name])
    suite = mutation.Suite(mutation.module_of(operator), tried=[operator])
    warnings.simplefilter("ignore")  # a broken kernel divides by zero and worse
    with progress_bar() as progress:
        drawn = suite.mutants()
        outcomes = [suite.outcome(mutant) for mutant in progress.track(drawn, description=f"mutants of {name}")]
    write_json(json_, [outcome.row() for outcome in outcomes])
    if str(json_) != "-":
        console.print(mutation.render_mutants(outcomes))
        for outcome in outcomes:
            if not outcome.caught:
                console.print(
                    f"survived: line {outcome.mutant.line}, {outcome.mutant.name}", highlight=False, markup=False
                )


def tune_command(
    operators: Operators = None,
    dtype: Dtypes = None,
    case: Annotated[str, typer.Option(help="bench, check, or the name of one case, which `tilestack ops NAME` lists.")] = "bench",
    budget: Annotated[float | None, typer.Option(min=0, help="Start no case that would end after this many seconds.", show_default=False)] = None,
    kept: Annotated[int, typer.Option(min=1, help="Configurations to time per backend, preselected by a cost model.")] = 8,
    backend: Annotated[str | None, typer.Option(help="Comma-separated backends; default: all but torch.", show_default=False)] = None,
    forward: Annotated[bool, typer.Option("--forward", help="Only the forward, for inference.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile and verify before timing in one; at most two fifths of the budget.")] = 1,
    ship: Annotated[bool, typer.Option("--ship", help="In a checkout, also update the shipped table.")] = False,
    json_: JsonFile = None,
    load: Load = None,
) -> None:  # fmt: skip
    """Find the fastest backend and configuration of operators on this GPU, for [bold]auto[/bold] to use.

    Every candidate is verified on a case before it is timed. By default only operators with several configurations are
    tuned. Results go to the user's cache as they are found, and take precedence over the shipped tables.
    """
    import torch

    from tilestack.lab import machine
    from tilestack.lab.bench import tune
    from tilestack.tuning import preferences

    tune.needs_gpu()
    load_files(load)
    chosen = pick_operators(operators)
    if not operators:
        chosen = [op for op in chosen if any(way.configs for way in op.implementations.values())]
    slug = machine.stamp("cuda")["slug"]
    tables = [preferences.user_table_path(slug), *([preferences.TABLES / f"{slug}.json"] if ship else [])]
    for table in tables:
        preferences.read_table(table)  # or nothing could be kept of what is measured
    found: list[tune.Tuned] = []
    named = backend.split(",") if backend else []
    dtypes = pick_dtypes(dtype) or [torch.bfloat16]
    try:
        for tuned in tune.tune(chosen, dtypes, case, kept, named, forward, budget, console, jobs, load or ()):
            found.append(tuned)
            # With the operator's cases before it: several may be of one bucket, which all of them rank.
            alike = [row for each in found if each.operator is tuned.operator for row in each.rows()]
            for table in tables:
                preferences.add_to_table(table, alike)
    finally:  # what Ctrl-C or an error leaves was measured and kept
        write_json(json_, [row for tuned in found for row in tuned.rows()])
        if found and str(json_) != "-":
            console.print(tune.render_tuned(found))
            console.print(f"auto reads {tables[0]}")


def explain_command(
    operators: Operators = None,
    target: Annotated[
        str, typer.Option(help="GPU architecture to compile for: sm_80, sm_90 or sm_100; no GPU needed.")
    ] = "sm_90",
    dtype: Dtypes = "bfloat16",
    quick: Annotated[bool, typer.Option(help="A few representative cases instead of every bench case.")] = False,
    ptx: Annotated[
        Path | None,
        typer.Option(help="Write each kernel's PTX into this folder.", callback=writable_folder, show_default=False),
    ] = None,
    json_: JsonFile = None,
) -> None:
    """Inspect the compiled code of each kernel: registers, spills, shared memory, instructions. Needs no GPU.

    Registers are per thread; fewer allow more concurrent warps. Spills, in bytes, go through memory and should be 0. ld.v4
    and st.v4 move 16 bytes, the maximum; plain ld and st in a memory-bound kernel mean that the compiler could not prove
    alignment. mma and wgmma are tensor-core instructions.

    [bold]tilestack explain softmax --quick --ptx ptx[/bold] also writes the PTX.
    """
    from tilestack.lab.compile.explain import explain, render_explain

    if target not in ("sm_80", "sm_90", "sm_100"):
        raise ValueError(f"target must be sm_80, sm_90 or sm_100, not {target!r}")
    reports = explain(operators or (), int(target.removeprefix("sm_")), pick_dtypes(dtype) or (), every_bench=not quick)
    write_json(json_, [report.row() for report in reports])
    for number, report in enumerate(reports if ptx else ()):
        assert ptx is not None
        write_text(ptx / f"{number:02d}_{report.kernel}.ptx", report.ptx)
    if str(json_) != "-":
        console.print(render_explain(reports))


def report_command(
    output: Annotated[Path, typer.Option(help="The page to write.", callback=report_page)] = Path("runs/report.html"),
    tables: Annotated[
        bool,
        typer.Option(
            "--tables", help="Instead, regenerate the tables in a checkout's README and docs from its results."
        ),
    ] = False,
) -> None:
    """Write a self-contained HTML report: proofs, roofline and peers, by machine.

    It shows the results shipped with tilestack and those saved in results/ by `bench --save` and `verify --save`.
    """
    root = checkout()
    if tables and root is None:
        raise ValueError("--tables renews the pages of a checkout, and this tilestack was installed from a wheel")
    from tilestack.lab import catalogue, contests, machine
    from tilestack.lab.proof import proved
    from tilestack.lab.report.write import write_report
    from tilestack.lab.tables.generated import update_tables

    if root and tables:
        changed = [*update_tables(root), *catalogue.update_stub()]
        console.print("\n".join(f"renewed {path}" for path in changed) or "tables are up to date")
        return
    folders = list(dict.fromkeys(folder.resolve() for folder in (shipped("results"), Path("results"))))
    runs = [run for folder in folders for run in contests.results_under(folder)]
    stamp = machine.stamp()
    path = write_report(output, runs, [], stamp, kept_proofs=proved.sections(folders, stamp["slug"]))
    console.print(f"wrote {path}")

"""`tilestack comm` measures what it says, between processes it starts, and times nothing that is wrong."""

import json
import subprocess
import sys

import pytest
import torch
from ranks import run_ranks

from tilestack.cli import main
from tilestack.lab.planning import comm

CPU = torch.device("cpu")


def measured(group):
    rows = list(comm.measure_collectives(list(comm.COLLECTIVES), [4, 4096], 2, group, CPU))
    table = [[row.bytes, row.seconds, row.algorithm_bandwidth, row.bus_bandwidth] for row in rows]
    return {"rows": torch.tensor(table, dtype=torch.float64)}


def test_collectives_are_right_and_bandwidths_those_of_nccl_tests(tmp_path):
    found = run_ranks(measured, 3, tmp_path)
    for other in found[1:]:
        assert torch.equal(found[0]["rows"], other["rows"])  # the time is that of the slowest rank, on all
    rows = dict(zip(comm.COLLECTIVES, found[0]["rows"].split(2), strict=True))
    factors = dict(all_reduce=4 / 3, all_gather=2 / 3, reduce_scatter=2 / 3, all_to_all=2 / 3, send_recv=1)
    factors["all_to_all_uneven"] = 5 / 6  # of six parts a rank keeps one
    assert factors.keys() == rows.keys()
    for name, factor in factors.items():
        for size, seconds, algorithm, bus in rows[name].tolist():
            assert seconds > 0
            assert algorithm == pytest.approx(size / seconds)
            assert bus == pytest.approx(algorithm * factor)
        parts = 6 if name == "all_to_all_uneven" else 3
        assert rows[name][:, 0].tolist() == [
            4 * parts,
            4096 // 4 // parts * 4 * parts,
        ]  # whole elements, as many in each


def broken(group):
    """all_reduce on a network that loses a number on its way to rank 1."""
    reduce = comm.COLLECTIVES["all_reduce"]

    def lossy(*given):
        call = reduce.prepare(*given)

        def run():
            call.run()
            call.out[group.rank() :][:1] -= group.rank()

        return call._replace(run=run)

    comm.COLLECTIVES["all_reduce"] = comm.Collective(lossy, reduce.carried)
    try:
        comm.measure_one("all_reduce", 64, 1, group, CPU)
    except comm.WrongResult as problem:
        return {"said": torch.tensor(list(str(problem).encode()))}
    return {"said": torch.zeros(0)}


def test_what_is_wrong_is_not_timed(tmp_path):
    for found in run_ranks(broken, 2, tmp_path):
        said = bytes(found["said"].tolist()).decode()
        assert said == "all_reduce of 64 bytes is wrong on rank 1; nothing was timed"


def test_the_command_starts_processes_itself():
    command = [sys.executable, "-m", "tilestack", "comm", "all_reduce", "send_recv", "--processes", "2"]
    options = ["--sizes", "1K,64K", "--repeats", "2", "--device", "cpu", "--json", "-"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["collective"], row["bytes"]) for row in rows] == [
        (name, size) for name in ("all_reduce", "send_recv") for size in (1024, 65536)
    ]
    assert all(row["bus_bandwidth"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--processes", "1"], 0, "there is one process alone, which has nobody to talk to"),
        (["broadcast"], 1, "there is no collective broadcast; choose from all_reduce"),
        (["--sizes", "1K,big"], 1, "with K, M or G (1024 of each other), not 'big'"),
        (["--sizes", "2"], 1, "a number of bytes from 4"),
        (["--processes", "0"], 1, "'--processes'"),
    ],
)
def test_one_process_and_wrong_arguments_end_in_a_line(capsys, arguments, code, said):
    with pytest.raises(SystemExit) as ended:
        main(["comm", "--device", "cpu", *arguments])
    printed = capsys.readouterr()
    assert ended.value.code == code
    assert said in " ".join((printed.err if code else printed.out).split())

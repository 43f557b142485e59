"""The report says which backends are proved on a GPU as their source is now."""

import json

import pytest

from tilestack import ops
from tilestack.lab.proof import proved
from tilestack.lab.stale import present_source


def kept(op, **others):
    made = dict(op=op, backend="triton", dtype="float32", direction="forward", proved=12, wrong=0, worst=0.4, commit="abc1234")  # fmt: skip
    return made | {"source": present_source(op, "triton")} | others


@pytest.fixture
def folder(tmp_path):
    proofs = [
        kept("softmax"),
        kept("relu", source="another"),
        kept("add", proved=10, wrong=2),
        kept("gelu", source=None),
    ]
    (tmp_path / "imaginary").mkdir()
    (tmp_path / "imaginary" / "proofs.json").write_text(json.dumps({"proofs": proofs}))
    return tmp_path


def test_only_what_holds_of_the_present_source_is_proved(folder):
    lines = {line.op: line for line in proved.standings(folder, "imaginary") if line.backend == "triton"}
    assert [name for name, line in lines.items() if line.is_proved] == ["softmax"]
    assert lines["gelu"].status == "of an older source (abc1234)"
    assert set(lines) == {op.name for op in ops.operators() if "triton" in op.implementations}


def test_one_older_proof_is_enough_to_doubt_a_backend(folder):
    path = folder / "imaginary" / "proofs.json"
    path.write_text(json.dumps({"proofs": [kept("softmax"), kept("softmax", dtype="float16", source="another")]}))
    (line,) = [
        line for line in proved.standings(folder, "imaginary") if (line.op, line.backend) == ("softmax", "triton")
    ]
    assert not line.is_proved
    assert line.status == "float16 forward of an older source (abc1234)"


def test_a_file_of_something_else_is_named(folder):
    (folder / "imaginary" / "proofs.json").write_text("{}")
    with pytest.raises(ValueError, match=r"proofs\.json is no file of proofs"):
        proved.standings(folder, "imaginary")


def test_the_section_counts_them(folder):
    section = proved.proofs_section(folder, "imaginary")
    total = len(proved.standings(folder, "imaginary"))
    assert section.lede.startswith(f"1 of {total} backends are proved")
    assert "2 of 12 claims fail" in section.body
    assert "tilestack verify --save" in proved.proofs_section(folder, "unknown").body

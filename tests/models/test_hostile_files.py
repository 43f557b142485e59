"""Files that are broken or mean harm: each is one clear error, soon, and nothing outside the folder is opened.

Mutations are drawn from a fixed seed. A file that takes longer than `SECONDS` fails its test instead of hanging it.
"""

import json
import random
import shutil
import signal
import struct
from contextlib import contextmanager

import pytest
import tiny_models as tiny

from tilestack import data, models
from tilestack.models import checkpoints

SECONDS = 5
DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE = [
    None, True, "", "text", 0, -1, 3, 2**31, 2**62, 10**30, 0.0, -0.5, 1e-320, 1e300, float("inf"), float("nan"),
    [], [[]], [2**40], ["x"], {}, {"rope_type": "yarn"}, {"factor": 1e300},
]  # fmt: skip


@contextmanager
def soon(what):
    """Fail where the block takes too long."""

    def late(*_):
        raise AssertionError(f"{what} took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused(call, what, errors=(models.CheckpointError, models.ConfigError)):
    """Whether a call ends in one of our errors, on one line; any other error is the test's."""
    try:
        with soon(what):
            call()
    except errors as error:
        message = str(error)
        assert len(message.splitlines()) == 1, (what, message[:300])
        assert len(message) < 1500, (what, message[:300])
        return True
    return False


@pytest.fixture
def folder(tmp_path):
    models.save(tiny.ours("smollm2"), tmp_path / "model", shard_size=30_000)
    return tmp_path / "model"


@pytest.mark.parametrize(
    "name",
    [
        "../elsewhere/model.safetensors", "/dev/zero", "..", ".", "", "a/../model.safetensors", "C:model.safetensors",
        "..\\elsewhere\\model.safetensors", "model.safetensors\0", "config.json", "a" * 5000 + ".safetensors", 3, None,
        ["model.safetensors"], {},
    ],
)  # fmt: skip
def test_an_index_names_files_beside_itself_alone(name, folder):
    models.save(tiny.ours("smollm2"), folder.parent / "elsewhere")
    index = folder / checkpoints.INDEX
    placed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(placed, name)}))
    with pytest.raises(models.CheckpointError, match=r"must name \.safetensors files beside itself, without a path"):
        models.load(folder)


def test_an_index_may_name_links(folder):
    """As the cache of huggingface_hub does: a snapshot's files are links to blobs elsewhere."""
    for file in sorted(folder.glob("*.safetensors")):
        file.rename(folder.parent / file.name)
        file.symlink_to(folder.parent / file.name)
    assert models.load(folder).config.layers == 2


def hostile_configs():
    """Every key that a family reads with every value that it should not hold."""
    for name in tiny.FAMILIES:
        given = tiny.config_of(name)
        family = models.families.FAMILIES[given["model_type"]]
        keys = {*family.keys.values(), *family.other_keys, *models.families.COMMON_KEYS}
        for key in sorted(keys - {"architectures", "transformers_version"}):
            for value in HOSTILE:
                yield name, key, given | {key: value}


def test_no_value_of_a_key_is_a_surprise():
    def build(given):
        models.ModelConfig.from_hf(given).to_hf()

    found = [refused(lambda g=given: build(g), (name, key, given[key])) for name, key, given in hostile_configs()]
    assert len(found) > 5000
    assert 0.2 < sum(found) / len(found) < 1.0


def test_a_hostile_config_beside_real_weights_is_refused_or_harmless(folder):
    draw = random.Random(0)
    given, keys = json.loads((folder / "config.json").read_text()), sorted(tiny.config_of("llama3"))
    outcomes = []
    for _ in range(150):
        changes = {draw.choice(keys): draw.choice(HOSTILE) for _ in range(draw.randint(1, 3))}
        (folder / "config.json").write_text(json.dumps(given | changes))
        outcomes.append(refused(lambda: models.load(folder), changes))
    assert {True, False} == set(outcomes)


def test_a_generation_config_says_where_to_stop_or_is_one_clear_error(folder):
    """What is no token is refused by the name of its file, what is no token of this model is passed over."""
    path, config = folder / checkpoints.GENERATION, models.load(folder).config
    outcomes = []
    for value in HOSTILE:
        path.write_text(json.dumps({"eos_token_id": value, "max_new_tokens": value, "_from_model_config": value}))
        outcomes.append(refused(lambda: models.load(folder), value))
        if not outcomes[-1]:
            assert all(0 <= token < config.vocabulary for token in set(models.load(folder).config.eos) - {*config.eos})
    assert {True, False} == set(outcomes)
    path.write_text('{"eos_token_id": "x"}')
    with pytest.raises(models.ConfigError, match=r"generation_config\.json: eos_token_id must be a token's number"):
        models.load(folder)
    path.write_text(json.dumps({"eos_token_id": [7, 5, 7, config.vocabulary]}))
    loaded = models.load(folder)
    assert loaded.config.eos[-2:] == (7, 5)
    models.save(loaded, folder)  # and what is saved stops there too
    assert json.loads(path.read_text())["eos_token_id"][-2:] == [7, 5]


@pytest.mark.parametrize("layers", [4097, 4096, 10**9])
def test_layers_that_are_not_there_are_not_built(layers, folder):
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | {"num_hidden_layers": layers}))
    assert refused(lambda: models.load(folder), layers)


@pytest.mark.parametrize("file", ["config.json", checkpoints.INDEX, checkpoints.GENERATION])
@pytest.mark.parametrize("text", [DEEP, "", "{", "3", '{"a": 1' + "0" * 5000 + "}", '{"weight_map": "x", "eos_token_id": "x"}', "\0"])  # fmt: skip
def test_json_that_is_none_or_too_deep(file, text, folder):
    (folder / file).write_text(text)
    assert refused(lambda: models.load(folder), text[:20])


@pytest.mark.parametrize(
    "raw", [b"", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 100000) + b"[" * 100000]
)  # fmt: skip
def test_safetensors_with_a_hostile_header(raw, tmp_path):
    models.save(tiny.ours("smollm2"), tmp_path)
    (tmp_path / checkpoints.WEIGHTS).write_bytes(raw)
    assert refused(lambda: models.load(tmp_path), raw[:20])


def mutated(raw, draw, number):
    """A third cut short, the others with a few bytes changed where a file's structure is."""
    raw = bytearray(raw)
    if number % 3 == 0:
        return raw[: draw.randrange(len(raw))]
    for _ in range(draw.randint(1, 4)):
        raw[draw.randrange(min(len(raw), 2000))] = draw.randrange(256)
    return raw


def test_mutated_safetensors(tmp_path):
    models.save(tiny.ours("smollm2"), tmp_path)
    file, draw = tmp_path / checkpoints.WEIGHTS, random.Random(1)
    raw = file.read_bytes()
    outcomes = []
    for number in range(150):
        file.write_bytes(mutated(raw, draw, number))
        outcomes.append(refused(lambda: models.load(tmp_path), number))
    assert sum(outcomes) > 100


def test_mutated_gguf(tmp_path):
    file, draw = tmp_path / "model.gguf", random.Random(2)
    tiny.write_gguf(file)
    raw = file.read_bytes()
    assert models.load(file).config.layers == 1
    outcomes = []
    for number in range(600):
        file.write_bytes(mutated(raw, draw, number))
        outcomes.append(refused(lambda: models.load(file), number))
    assert sum(outcomes) > 400


@pytest.mark.parametrize(
    ("key", "value"),
    [("head_count", 0), ("head_count", 2**31), ("block_count", 2**32 - 1), ("block_count", 0), ("embedding_length", 0)]
    + [("feed_forward_length", 65), ("head_count_kv", 3), ("context_length", 0), ("eps", float("nan"))],
)
def test_gguf_with_a_size_that_makes_no_sense(key, value, tmp_path):
    tiny.write_gguf(tmp_path / "model.gguf", **{key: value})
    assert refused(lambda: models.load(tmp_path / "model.gguf"), key)


def test_gguf_whose_counts_are_beyond_the_file(tmp_path):
    """An array of 2^56 elements, and one within another within another."""
    key = struct.pack("<Q", 1) + b"k"
    endless = struct.pack("<IIQQ", 0x46554747, 3, 0, 1) + key + struct.pack("<IIQ", 9, 0, 1 << 56)
    strings = struct.pack("<IIQQ", 0x46554747, 3, 0, 1) + key + struct.pack("<IIQ", 9, 8, 1 << 56)
    nested = struct.pack("<IIQQ", 0x46554747, 3, 0, 1) + key + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    tensors = struct.pack("<IIQQ", 0x46554747, 3, 1 << 60, 0)
    for raw in (endless, strings, nested, tensors):
        (tmp_path / "model.gguf").write_bytes(raw)
        assert refused(lambda: models.load(tmp_path / "model.gguf"), raw[:40])


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    data.Tokenizer.train(["a few words of text"] * 3, 300).save(folder)
    (folder / "special_tokens_map.json").write_text("{}")
    return folder


def read_tokenizer(folder):
    """Load it and use it once."""
    tokenizer = data.Tokenizer.load(folder)
    return tokenizer.decode(tokenizer.encode("a few words"))


def refused_tokenizer(folder, what):
    return refused(lambda: read_tokenizer(folder), what, (data.DataError,))


@pytest.mark.parametrize("file", TOKENIZER_FILES)
@pytest.mark.parametrize("text", [DEEP, "", "{", "3", "[]", '{"a": 1' + "0" * 5000 + "}", "\0"])
def test_tokenizer_files_that_are_no_json(file, text, tokenizer_folder, tmp_path):
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(text)
    assert refused_tokenizer(tmp_path, (file, text[:20]))


@pytest.mark.parametrize("key", ["bos_token", "eos_token", "pad_token", "chat_template"])
def test_a_tokenizer_config_with_hostile_values(key, tokenizer_folder, tmp_path):
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    given = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for value in [*HOSTILE, {"content": 3}, {"content": ["x"]}, "no such token", [{"name": "default", "template": 3}]]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given | {key: value}))
        refused_tokenizer(tmp_path, (key, value))


def test_mutated_tokenizers(tokenizer_folder, tmp_path):
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    draw, raw = random.Random(3), (tmp_path / "tokenizer.json").read_bytes()
    outcomes = []
    for number in range(200):
        (tmp_path / "tokenizer.json").write_bytes(mutated(raw, draw, number))
        outcomes.append(refused_tokenizer(tmp_path, number))
    assert sum(outcomes) > 100


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type", "pre", "model", "bos_token_id", "add_bos_token"])
def test_a_gguf_tokenizer_with_hostile_values(key):
    good = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "token_type": [1, 1, 1], "bos_token_id": 0}
    for value in HOSTILE:
        given = {f"tokenizer.ggml.{name}": held for name, held in (good | {key: value}).items()}
        refused(lambda g=given: data.Tokenizer.from_gguf(g), (key, value), (data.DataError,))

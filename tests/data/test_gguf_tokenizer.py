"""Tokenizers in the words of a GGUF file: read by its tables alone they give the same ids, or they are refused."""

import itertools
import json

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tilestack import data
from tilestack.data import gguf_tokenizer
from tilestack.data.chat import CHATML
from tilestack.data.pretokenizers import byte_level
from tilestack.data.tokenizer_sources import WHOLE

TEXT = "the cat sat on the mat, and the dog sat too; it's 1234 o'clock. def main(): return [None] * 10\n" * 20
AWKWARD = [
    "",
    " ",
    "Hello  world",
    "12345 6x",
    "don't X'S\n\n\n  y",
    "\ttab\r\n",
    "naïve 漢字 кот 🙂",
    "a<|im_end|>b",
    "nai\u0308ve",
]


def byte_level_tokenizer(pre, **changes):
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    backend.normalizer, backend.pre_tokenizer = byte_level(pre)
    for name, value in changes.items():
        setattr(backend, name, value)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.add_tokens([tokenizers.AddedToken("<tool>", special=False, normalized=False)])
    return data.Tokenizer(backend, bos="<|endoftext|>", eos="<|im_end|>")


def by_tables(metadata):
    return data.Tokenizer.from_gguf({key: value for key, value in metadata.items() if key != WHOLE})


@pytest.mark.parametrize("pre", gguf_tokenizer.KNOWN_CUTS)
def test_tables_alone_give_the_same_ids(pre):
    tokenizer = byte_level_tokenizer(pre)
    made = tokenizer.to_gguf(tokenizer.vocabulary + 5)
    assert made.metadata["tokenizer.ggml.pre"] == pre
    assert len(made.metadata["tokenizer.ggml.tokens"]) == tokenizer.vocabulary + 5
    assert made.metadata["tokenizer.ggml.token_type"][-6:] == [4, 5, 5, 5, 5, 5]
    assert made.metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert any("NFC" in note for note in made.notes) == (pre in ("qwen2", "qwen35"))
    again = by_tables(made.metadata)
    for text in [*AWKWARD, "a<tool>b"]:
        assert again.encode(text) == tokenizer.encode(text)
    assert (again.bos, again.eos, again.pad) == (tokenizer.bos, tokenizer.eos, None)


def test_what_tilestack_trains_has_a_name_and_comes_back_whole():
    tokenizer = data.Tokenizer.train([TEXT], 320)
    made = tokenizer.to_gguf(tokenizer.vocabulary)
    assert made.metadata["tokenizer.ggml.pre"] == "qwen2"
    assert made.metadata["tokenizer.ggml.add_bos_token"] is True
    assert made.notes == []
    again = data.Tokenizer.from_gguf(made.metadata)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("nai\u0308ve") == tokenizer.encode("nai\u0308ve")  # which by its tables would be composed


def test_a_chat_model_is_given_no_begin_that_its_conversations_lack():
    tokenizer = data.Tokenizer.train([TEXT], 320)
    chat = tokenizer.for_chat().to_gguf(tokenizer.vocabulary)
    assert chat.metadata["tokenizer.ggml.add_bos_token"] is False
    assert chat.metadata["tokenizer.ggml.eos_token_id"] == tokenizer.backend.token_to_id("<|im_end|>")
    assert chat.metadata["tokenizer.chat_template"] == CHATML
    assert "begins without <|endoftext|>" in chat.notes[0]
    begun = tokenizer.for_chat("{{ bos_token }}" + CHATML).to_gguf(tokenizer.vocabulary)
    assert begun.metadata["tokenizer.ggml.add_bos_token"] is True
    assert begun.notes == []


@pytest.mark.parametrize(
    "cutting",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(False)]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]),
    ],
)  # fmt: skip
def test_an_unknown_way_of_cutting_is_refused_unless_it_is_named(cutting):
    tokenizer = byte_level_tokenizer("gpt-2", pre_tokenizer=cutting)
    with pytest.raises(data.DataError, match=r"cuts texts as this tokenizer does.*--pre NAME"):
        tokenizer.to_gguf(tokenizer.vocabulary)
    assert tokenizer.to_gguf(tokenizer.vocabulary, pre="gpt-2").metadata["tokenizer.ggml.pre"] == "gpt-2"


def test_words_taken_whole_are_part_of_the_way():
    tokenizer = byte_level_tokenizer("llama-bpe")
    tokenizer.backend.model.ignore_merges = False
    assert tokenizer.to_gguf(tokenizer.vocabulary).metadata["tokenizer.ggml.pre"] == "dbrx"
    tokenizer = byte_level_tokenizer("gpt-2")
    tokenizer.backend.model.ignore_merges = True
    with pytest.raises(data.DataError, match="cuts texts"):
        tokenizer.to_gguf(tokenizer.vocabulary)


def test_other_regexes_for_the_same_cuts_are_known_by_what_they_do():
    gpt2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    split = [pre_tokenizers.Split(Regex(gpt2), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer = byte_level_tokenizer("gpt-2", pre_tokenizer=pre_tokenizers.Sequence(split))
    assert tokenizer.to_gguf(tokenizer.vocabulary).metadata["tokenizer.ggml.pre"] == "gpt-2"


def test_ends_that_llama_cpp_would_not_see_have_places_of_their_own():
    tokenizer = byte_level_tokenizer("gpt-2")
    im_end, *own = (tokenizer.backend.token_to_id(token) for token in ("<|im_end|>", "<tool>", "Ġ", "a"))
    made = tokenizer.to_gguf(tokenizer.vocabulary, [tokenizer.bos, *own])
    kept = {key: made.metadata[f"tokenizer.ggml.{key}_token_id"] for key in ("eos", "eot", "eom")}
    assert kept == {"eos": im_end, "eot": own[0], "eom": own[1]}  # <|endoftext|> it knows
    assert made.notes == ["llama.cpp does not end at a, which ends a text too: it has no place for a fourth"]
    tokenizer.eos = None
    assert tokenizer.to_gguf(tokenizer.vocabulary, own).metadata["tokenizer.ggml.eos_token_id"] == own[0]
    with pytest.raises(data.DataError, match="which token ends a text"):
        tokenizer.to_gguf(tokenizer.vocabulary)


def sentencepiece_tokenizer(normalizer=None, pre_tokenizer=None, whole=True):
    """As transformers makes one of SentencePiece's: bytes, pieces, and as merges all ways to make a piece of two."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    pieces += [
        "▁t",
        "he",
        "▁the",
        "at",
        "▁c",
        "▁s",
        "▁m",
        "on",
        "▁on",
        "th",
        "▁cat",
        "▁sat",
        "▁mat",
        "ca",
        "cat",
        "sa",
        "▁a",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    ids = {token: number for number, token in enumerate(tokens)}
    merges = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
    merges = [(a, b) for a, b in merges if a in ids and b in ids]
    assert ("ca", "t") in merges
    model = models.BPE(ids, merges if whole else [pair for pair in merges if pair != ("ca", "t")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)  # fmt: skip
    backend = tokenizers.Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "[INST]"])
    return data.Tokenizer(backend, bos="<s>", eos="</s>")


LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
GEMMA = normalizers.Replace(" ", "▁")


def merged_by_scores(metadata, text):
    """What llama.cpp does: of all neighbours that are a token together, merge those of the best score, leftmost first."""
    of = lambda key: metadata[f"tokenizer.ggml.{key}"]
    ids = {token: number for number, token in enumerate(of("tokens"))}
    parts = list((" " * of("add_space_prefix") + text).replace(" ", "▁"))
    while True:
        found = [(-of("scores")[ids[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not found:
            break
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [number for part in parts for number in ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()])]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "prefix"),
    [
        (dict(normalizer=LLAMA2), True),
        (dict(normalizer=GEMMA), False),
        (dict(normalizer=GEMMA, pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous")), False),
        (dict(pre_tokenizer=pre_tokenizers.Metaspace("▁", "first", split=False)), True),
        (dict(pre_tokenizer=pre_tokenizers.Metaspace("▁", "never", split=False)), False),
    ],
)
def test_sentencepiece_by_its_scores_gives_the_same_ids(given, prefix):
    tokenizer = sentencepiece_tokenizer(**given)
    made = tokenizer.to_gguf(tokenizer.vocabulary)
    of = lambda key: made.metadata[f"tokenizer.ggml.{key}"]
    assert (of("model"), of("add_space_prefix"), of("add_bos_token"), of("add_eos_token")) == (
        "llama",
        prefix,
        True,
        False,
    )
    assert (of("bos_token_id"), of("eos_token_id"), of("unknown_token_id")) == (1, 2, 0)
    assert of("token_type")[:4] == [2, 3, 3, 6]
    assert of("token_type")[-1] == 3
    texts = ["the cat sat on the mat.", "a  cat, athe thecat", "scatonthe é漢", " on"]
    if made.notes:
        assert made.notes[0].startswith("llama.cpp puts a space before every text")
        texts.remove(" on")
    assert bool(made.notes) == (prefix and "pre_tokenizer" in given)
    for text in texts:
        assert merged_by_scores(made.metadata, text) == tokenizer.encode(text, bare=True), text
    assert data.Tokenizer.from_gguf(made.metadata).encode("the [INST] cat") == tokenizer.encode("the [INST] cat")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(normalizer=GEMMA, whole=False), "SentencePiece could have made"),
        (dict(), "SentencePiece could have made"),
        (dict(normalizer=normalizers.Sequence([normalizers.NFKC(), GEMMA])), "SentencePiece could have made"),
    ],
)
def test_what_is_no_sentencepiece_is_refused_unless_it_is_named(given, said):
    tokenizer = sentencepiece_tokenizer(**given)
    with pytest.raises(data.DataError, match=said):
        tokenizer.to_gguf(tokenizer.vocabulary)
    assert tokenizer.to_gguf(tokenizer.vocabulary, pre="default").metadata["tokenizer.ggml.model"] == "llama"


def test_other_tokenizers_are_named():
    for model, said in (
        (models.WordLevel({"a": 0}, unk_token="a"), "kind WordLevel"),
        (models.BPE({"a": 0}, []), "neither of bytes"),
    ):
        with pytest.raises(data.DataError, match=said):
            data.Tokenizer(tokenizers.Tokenizer(model), eos="a").to_gguf(1)
    small = data.Tokenizer.train(["ab"], 259)
    with pytest.raises(data.DataError, match="merges nothing"):
        small.to_gguf(small.vocabulary)
    with pytest.raises(data.DataError, match="does not match the model"):
        small.to_gguf(100)
    with pytest.raises(data.DataError, match="is not a tokenizer"):
        data.Tokenizer.from_gguf({WHOLE: json.dumps({"model": 1}), "tokenizer.ggml.tokens": ["a"]})


def test_names_that_fill_up_are_no_tokens_that_there_are():
    tokenizer = byte_level_tokenizer("gpt-2")
    tokenizer.backend.add_tokens(["[PAD0]", "[PAD402]"])
    made = tokenizer.to_gguf(tokenizer.vocabulary + 500).metadata["tokenizer.ggml.tokens"]
    assert len(set(made)) == len(made) == tokenizer.vocabulary + 500

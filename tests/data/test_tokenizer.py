"""Tokenizers: exact round trips, the same ids in transformers, and errors that name what does not fit."""

import json
import os
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tilestack.data import CHATML, Conversation, DataError, Tokenizer
from tilestack.data.pretokenizers import byte_level
from tilestack.data.tokenizer_sources import LONGEST_RUN, in_parts

AWKWARD = [
    "def f(x):\n    return [1234, 'it''s'] # naïve cafe\u0301\r\n\t\tpass   \n\n\n",
    "漢字 кот 🙂 \u200d ﷽",
    " 3.14e-10  ",
    "<|im_start|>user\nHi<|im_end|>",
    "",
]


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_text_comes_back_to_the_byte(tokenizer, text):
    (ids,) = tokenizer.encode_documents([text])
    assert tokenizer.decode(ids) == text
    assert sum(tokenizer.token_bytes[token] for token in ids) == len(text.encode())


def test_the_bytes_of_tokens_are_known_in_sentencepiece_vocabularies_too():
    backend = Backend(models.BPE({"▁": 0, "▁Hi": 1, "<0xC3>": 2, "ü": 3}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_tokens(["  x"])
    backend.add_special_tokens(["<s>"])
    assert Tokenizer(backend).token_bytes == [1, 3, 1, 2, 3, 0]


def test_the_bytes_of_tokens_that_were_added_to_a_byte_level_vocabulary_are_those_of_their_text(tokenizer):
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_tokens(["漢字"])  # as it is, and not in the alphabet of the others
    made, ids = Tokenizer(backend), backend.encode("a漢字").ids
    assert [made.token_bytes[token] for token in ids if made.decode([token]) == "漢字"] == [6]


def test_a_fingerprint_knows_the_end_of_texts_and_the_same_ids_do_not(tokenizer):
    other = Tokenizer(tokenizer.backend, eos="<|im_end|>")
    assert other.same_ids(tokenizer)
    assert other.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("run", ["x", " ", "一"])
def test_a_long_line_is_learned_in_parts(run):
    text = run * 20_000 + " and more"
    assert "".join(in_parts(text)) == text
    assert list(in_parts("two words ")) == ["two words "]
    longest = max(len(token) for token in Tokenizer.train([text], 256 + 3 + 60).backend.get_vocab())
    assert longest <= LONGEST_RUN * len(run.encode())


def test_ctrl_c_ends_learning_at_once(request):
    read = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background may ignore
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def texts():
        yield "a text"
        os.kill(os.getpid(), signal.SIGINT)
        for number in range(500):
            time.sleep(0.01)
            read.append(number)
            yield "a text"

    with pytest.raises(KeyboardInterrupt):
        Tokenizer.train(texts(), 300)
    assert len(read) < 400


def test_an_error_in_the_texts_ends_learning():
    def texts():
        yield "a text"
        raise DataError("a.txt:7: not UTF-8")

    with pytest.raises(DataError, match=r"a\.txt:7"):
        Tokenizer.train(texts(), 300)


def test_a_tokenizer_without_turns_cannot_chat(tmp_path):
    plain = Tokenizer(Backend(models.BPE({"a": 0, "b": 1}, [])))
    plain.save(tmp_path)
    assert Tokenizer.load(tmp_path).template is None
    with pytest.raises(DataError, match="no chat template"):
        plain.chat_ids([Conversation([{"role": "user", "content": "a"}])])
    assert plain.stops == ()


def test_a_document_begins_and_ends_and_cannot_end_itself(tokenizer):
    (ids,) = tokenizer.encode_documents(["a <|endoftext|> b"])
    assert ids.count(tokenizer.eos) == 2
    assert ids[0] == ids[-1] == tokenizer.bos == tokenizer.eos
    assert tokenizer.encode("a <|endoftext|> b", bare=True).count(tokenizer.eos) == 1


def test_what_is_saved_loads_as_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.template is None  # nobody taught it to chat
    assert (loaded.bos, loaded.eos, loaded.pad) == (tokenizer.bos, tokenizer.eos, tokenizer.pad)
    assert Tokenizer.load(tmp_path / "tokenizer.json").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3"])
def test_transformers_gives_the_same_ids(tokenizer, sources, messages, tmp_path, model_type):
    transformers = pytest.importorskip("transformers")
    taught = Tokenizer(tokenizer.backend, bos="<|endoftext|>", eos="<|endoftext|>", template=CHATML)
    taught.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*AWKWARD, sources[0]]:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == tokenizer.decode(ids, special=True)
    assert theirs.apply_chat_template(messages, tokenize=False) == tokenizer.chat(messages)
    assert theirs.apply_chat_template(messages)["input_ids"] == tokenizer.chat_ids([Conversation(messages)])[0][0][0]
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (
        tokenizer.bos,
        tokenizer.eos,
        tokenizer.vocabulary,
    )


def test_the_special_tokens_may_be_objects_and_templates_a_list(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    config = {
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "pad_token": "<nowhere>",
        "chat_template": [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ eos_token }}!"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos == tokenizer.backend.token_to_id("<|im_end|>")
    assert loaded.pad is None
    assert loaded.chat([{"role": "user", "content": "Hi"}]) == "<|im_end|>!"


def gguf_metadata(sources, pre):
    """A small byte-level BPE in the words of a GGUF file, and the tokenizer that it should become."""
    from tokenizers import trainers

    backend = Backend(models.BPE())
    backend.normalizer, backend.pre_tokenizer = byte_level(pre)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(
        sources,
        trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    parts = json.loads(backend.to_str())
    vocabulary = sorted(parts["model"]["vocab"], key=parts["model"]["vocab"].get)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in parts["model"]["merges"]],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in vocabulary],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    return metadata, backend


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_a_gguf_file_holds_the_same_tokenizer(sources, pre):
    metadata, backend = gguf_metadata(sources[:3], pre)
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in [*AWKWARD, sources[-1][:4000]]:
        assert tokenizer.encode(text) == backend.encode(text).ids
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.stops) == (1, 2, None, (2, 0))
    assert tokenizer.chat([{"role": "user", "content": "Hi"}]) == "Hi"
    begun = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert begun.encode("Hi") == [1, *tokenizer.encode("Hi")]
    ended = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_eos_token": True})  # as of models that make vectors
    assert (ended.encode("Hi"), ended.encode("Hi", bare=True)) == ([*tokenizer.encode("Hi"), 2], tokenizer.encode("Hi"))
    assert ended.encode_documents(["Hi"]) == tokenizer.encode_documents(["Hi"]) == [[*tokenizer.encode("Hi"), 2]]


@pytest.mark.parametrize(("pre", "begins"), [("llama3", True), ("tekken", True), ("qwen2", False), ("glm4", False)])
def test_where_a_gguf_file_does_not_say_its_way_of_cutting_says_whether_texts_begin_with_a_token(sources, pre, begins):
    metadata, _ = gguf_metadata(sources[:1], pre)
    del metadata["tokenizer.ggml.add_bos_token"]
    assert (Tokenizer.from_gguf(metadata).encode("Hi")[0] == 1) == begins


def test_pre_tokenizers_cut_numbers_and_indentation_as_their_models_do():
    cut = lambda name, text: [piece for piece, _ in byte_level(name)[1].pre_tokenize_str(text)]
    assert cut("smollm", "x 123") == ["x", "Ġ", "1", "2", "3"]
    assert cut("gpt-2", "x 123") == ["x", "Ġ123"]
    assert cut("qwen2", "x 1234") == ["x", "Ġ", "1", "2", "3", "4"]
    assert cut("llama-bpe", "x 1234") == ["x", "Ġ", "123", "4"]
    assert cut("llama-bpe", "    x\n\n  y") == ["ĠĠĠ", "Ġx", "ĊĊ", "Ġ", "Ġy"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "llama"}, "kind 'llama'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "no pre-tokenizer named 'unheard-of'"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "names token 1000000"),
        ({"tokenizer.ggml.merges": ["Q§ ¤x"]}, "malformed"),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_read_says_why(sources, change, said):
    metadata, _ = gguf_metadata(sources[:1], "gpt-2")
    with pytest.raises(DataError, match=said):
        Tokenizer.from_gguf(metadata | change)


def test_a_tokenizer_that_does_not_match_is_refused(tokenizer):
    tokenizer.check_against(600)
    with pytest.raises(DataError, match="ids go up to 599, the model knows 599"):
        tokenizer.check_against(599)
    with pytest.raises(DataError, match=r"ids go up to 599, the model knows 512 tokens.*vocab_size ≥ 600"):
        tokenizer.check_against(512)


def test_files_that_are_no_tokenizers_are_named(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model at .*nowhere.*one of smollm2"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer in .*: it has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    with pytest.raises(DataError, match="'<gone>' is not in its vocabulary"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match="a vocabulary of 100 is too small; 259"):
        Tokenizer.train(["text"], 100)


@pytest.mark.parametrize(
    "name", ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>"]
)
def test_answers_end_at_every_token_that_ends_one_in_models_of_today(name):
    """Whatever a file calls its end token: Llama 3.1 has three, and a GGUF file names the first."""
    vocabulary = {"<|endoftext|>": 0, "a": 1, name: 2}
    tokenizer = Tokenizer(Backend(models.WordLevel(vocabulary)), eos="<|endoftext|>")
    assert tokenizer.stops == (0, 2)


def test_a_tokenizer_for_chat_has_the_template_and_the_end_of_its_answers(tokenizer):
    chatty = tokenizer.for_chat()
    assert tokenizer.template is None
    assert chatty.template == CHATML
    assert [chatty.decode([token], special=True) for token in chatty.stops] == ["<|im_end|>", "<|endoftext|>"]
    assert chatty.eos == chatty.answer_end != tokenizer.eos
    assert chatty.same_ids(tokenizer)
    ended = tokenizer.for_chat("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    assert ended.eos == tokenizer.eos
    thinking = tokenizer.for_chat("{{ messages[-1].content }}{% if add_generation_prompt %}<think>{% endif %}")
    assert (thinking.answer_end, thinking.eos) == (None, tokenizer.eos)

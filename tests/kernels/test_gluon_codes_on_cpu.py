"""Attention of codes for Hopper proved on a CPU, by an emulation of Gluon: what it computes, and that its barriers let it."""

import gluon_emulation
import pytest
import torch
from gluon_emulation import emulate
from test_gluon_on_cpu import DOCUMENTS, READ_AS_THEY_LIE, SHAPES, Copies, memory_of_tiles

from tilestack import ops
from tilestack.contract.cases import Make
from tilestack.contract.launch import launch
from tilestack.contract.named import call_named
from tilestack.kernels.attention import quantised
from tilestack.kernels.hopper import attention_codes
from tilestack.kernels.hopper.attention_codes import CONFIGS, attention_fp8, attention_int8, attention_of_codes, takes
from tilestack.lab.proof.oracle import judge, own_error
from tilestack.ops.quantised_attention import with_far_channels

KINDS = ["int8 and halves", "int8 and fp8", "fp8"]
each_kind = pytest.mark.parametrize("kind", KINDS)
FIRST = next(iter(CONFIGS.values()))


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Gluon kernels run in the emulation, and Triton's, as ever, in the interpreter."""
    monkeypatch.setattr(
        attention_codes,
        "launch",
        lambda kernel, *rest, **named: (emulate if "Gluon" in type(kernel).__name__ else launch)(
            kernel, *rest, **named
        ),
    )


def inputs(batch, queries, keys, heads, kv_heads, dim, causal, **options):
    make = Make(torch.float16)
    rule = "causal" if causal else "full"
    return with_far_channels(make, batch, queries, keys, heads, kv_heads, dim, dim, rule, **options)


def rows_of_documents(ends, shape):
    batch, queries, heads, kv_heads, dim = shape
    packed = torch.tensor([0, *ends], dtype=torch.int32)
    return inputs(batch, queries, queries, heads, kv_heads, dim, True) | dict(cu_seqlens=packed)


def check(kind, arguments, config=FIRST):
    """Hold a kernel to the definition, as `verify` does on a GPU."""
    operator, kernel = (ops.attention_fp8, attention_fp8) if kind == "fp8" else (ops.attention_int8, attention_int8)
    if kind == "int8 and fp8":
        arguments = arguments | dict(values="fp8")
    bound = operator.bind(**arguments)
    assert call_named(takes, bound) is True
    exact = {name: x.double() if name in ("q", "k", "v") else x for name, x in bound.items()}
    reference, truth = operator.definition(**bound), operator.definition(**exact)
    found = kernel(*bound.values(), config=config)
    assert not (message := judge(found, reference, truth, own_error(reference, truth)).message), message


@each_kind
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_codes(shape, kind):
    check(kind, inputs(*SHAPES[shape]))


@each_kind
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_packed_documents(documents, kind):
    check(kind, rows_of_documents(*DOCUMENTS[documents]))


@each_kind
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration(name, kind, monkeypatch):
    monkeypatch.setattr(attention_codes, "multiprocessors", lambda device: 2)
    check(kind, inputs(1, 250, 390, 3, 1, 64, True), CONFIGS[name])
    check(kind, rows_of_documents([40, 300, 390, 400], (1, 400, 3, 1, 64)), CONFIGS[name])


@each_kind
@pytest.mark.parametrize("seed", range(4))
def test_in_whatever_order_things_happen(seed, kind, monkeypatch):
    monkeypatch.setattr(
        gluon_emulation.emulate, "__kwdefaults__", gluon_emulation.emulate.__kwdefaults__ | dict(seed=seed)
    )
    monkeypatch.setattr(attention_codes, "multiprocessors", lambda device: 1)
    config = CONFIGS["in turns" if seed % 2 else "free"]
    check(kind, inputs(1, 200, 330, 2, 1, 64, True), config)


@each_kind
@pytest.mark.parametrize("lie", READ_AS_THEY_LIE)
def test_another_scale_and_tensors_that_lie_apart(kind, lie):
    arguments = inputs(2, 70, 70, 4, 2, 64, False) | dict(scale=0.3)
    for name in "qkv":
        arguments[name] = READ_AS_THEY_LIE[lie](arguments[name])
    check(kind, arguments)


@each_kind
@pytest.mark.parametrize("lie", READ_AS_THEY_LIE)
def test_nothing_is_copied(kind, lie, monkeypatch):
    moved = []
    for module in (attention_codes, quantised):
        monkeypatch.setattr(
            module, "launch", lambda kernel, grid, *given, **named: moved.append(memory_of_tiles(given))
        )
    q, k, v = (READ_AS_THEY_LIE[lie](inputs(2, 70, 70, 4, 2, 64, False)[name]) for name in "qkv")
    codes, values = torch.float8_e4m3fn if kind == "fp8" else torch.int8, "same" if "halves" in kind else "fp8"
    with Copies() as copies:
        attention_of_codes(q, k, v, None, False, None, codes, values, FIRST)
    assert copies.made == []
    of_q, _, of_v, _ = moved[-1]
    assert of_q == q.data_ptr()
    assert values == "fp8" or of_v == v.data_ptr()


@each_kind
def test_scores_so_low_that_a_key_beyond_the_last_would_weigh_more_than_all(kind):
    arguments = inputs(*SHAPES["full and a rest"])
    arguments["q"], arguments["k"] = arguments["q"].abs() * 20, -arguments["k"].abs()
    check(kind, arguments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(dim=80), "64 or 128 dimensions"),
        (dict(queries=3), "few of them at the end of more keys"),
        (dict(rule="documents", causal=False), "documents that are not causal"),
        (dict(batch=0), "at least one query"),
    ],
)
def test_what_is_left_to_others(change, said):
    sizes = dict(batch=1, queries=100, keys=100, heads=2, kv_heads=1, dim=64, rule="causal") | change
    causal = sizes.pop("causal", True)
    made = with_far_channels(Make(torch.float16, "meta"), value_dim=sizes["dim"], **sizes) | dict(causal=causal)
    assert said in call_named(takes, ops.attention_fp8.bind(**made))


@each_kind
def test_nan_of_a_query_stays_in_its_row(kind):
    """The largest of a row overlooks NaN on a GPU, and codes of integers have none: it is in the scale, or lost."""
    arguments = inputs(1, 70, 70, 2, 1, 64, True)
    arguments["q"][0, 33, 1, 5] = torch.nan
    check(kind, arguments)

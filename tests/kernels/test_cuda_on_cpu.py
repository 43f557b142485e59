"""The CUDA C++ kernels proved on a CPU, with their launchers around them: against the definitions of the operators they
implement, and the decode step against a decoder."""

import copy
import functools
import inspect
import shutil

import cuda_emulation
import pytest
import torch
from fenced_memory import Fences

from tilestack import models, ops
from tilestack.contract.cases import Make
from tilestack.engine.cpu_weights import unpack_codes
from tilestack.engine.persistent import shape_of, weights_of
from tilestack.engine.plain_decoder import linears_of
from tilestack.engine.quantised_weights import has_codes, quantise_weights
from tilestack.kernels.cuda import add, decode_step, matmul, paged_decode, rms_norm, softmax, weight_only
from tilestack.lab.proof.memory_guards import poisoned_memory
from tilestack.lab.proof.oracle import judge, own_error
from tilestack.models import ModelConfig, PagedBatch, PagedCache
from tilestack.ops.paged import paged_case
from tilestack.ops.weight_only import pack_int4, weight_only_case

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="compiling needs g++, which is not here")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")

    @functools.cache
    def compiled(source, architecture=None, /, **constants):
        return cuda_emulation.compiled_for_cpu(source, folder / "_".join(map(str, [source, *constants.values()])), **constants)  # fmt: skip

    return compiled


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, library):
    for module in (add, softmax, rms_norm, matmul, weight_only, decode_step, paged_decode):
        monkeypatch.setattr(module, "library", library)
        monkeypatch.setattr(module, "call", cuda_emulation.call_on_cpu)


def check(launcher, op, *arguments):
    """As good as the definition in the same dtype, by the same judge as `tilestack verify`."""
    result, reference = launcher(*arguments), op.definition(*arguments)
    wide = [each.double() if isinstance(each, torch.Tensor) and each.dtype in FLOATS else each for each in arguments]
    truth = op.definition(*wide)
    assert result.is_contiguous()
    assert not (message := judge(result, reference, truth, own_error(reference, truth)).message), message


def awkward(*shape, dtype):
    """Numbers whose first is not on 16 bytes."""
    return torch.randn(torch.Size(shape).numel() + 1).to(dtype)[1:].view(shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("make", [lambda *s, dtype: torch.randn(s).to(dtype), awkward], ids=["aligned", "off"])
def test_rows_and_vectors(dtype, make):
    torch.manual_seed(0)
    for shape in [(1, 1), (3, 33), (2, 1024), (2, 1029)]:
        x = make(*shape, dtype=dtype)
        check(add.add, ops.add, x, make(*shape, dtype=dtype))
        check(softmax.softmax, ops.softmax, 4 * x, -1)
        check(rms_norm.rms_norm, ops.rms_norm, x, make(shape[-1], dtype=dtype), 1e-6)
        check(rms_norm.rms_norm, ops.rms_norm, x, None, 1e-6)
    check(softmax.softmax, ops.softmax, make(4, 5, 6, dtype=dtype), 1)
    check(add.add, ops.add, make(6, 4, dtype=dtype).T, make(4, 6, dtype=dtype))


def test_rows_without_a_distribution():
    x = torch.zeros(5, 40)
    x[0] = -torch.inf
    x[1, 3], x[2, 3], x[3, 3] = torch.inf, torch.nan, -torch.inf
    out = softmax.softmax(x, -1)
    torch.testing.assert_close(out, torch.softmax(x, -1), equal_nan=True)
    assert out[:3].isnan().all()


SIZES = [(1, 1, 1), (5, 17, 33), (64, 64, 64), (70, 130, 40), (3, 24, 304), (129, 131, 72), (8, 8, 0)]


@pytest.mark.parametrize(
    ("product", "dtype"), [(matmul.linear_tiled, t) for t in FLOATS] + [(matmul.linear, t) for t in HALVES]
)
def test_products(product, dtype):
    torch.manual_seed(0)
    for rows, columns, inner in SIZES if dtype in HALVES else SIZES[:5]:
        x, weight = torch.randn(rows, inner).to(dtype), (torch.randn(columns, inner) * max(inner, 1) ** -0.5).to(dtype)
        check(product, ops.linear, x, weight, torch.randn(columns).to(dtype))
        check(product, ops.linear, x, weight, None)
    check(product, ops.linear, torch.randn(40, 24).to(dtype).T, torch.randn(40, 17).to(dtype).T, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_sums_lose_no_digits(dtype):
    """One chain of additions over K is off by a multiple of what the definition is, most of all where all terms are equal."""
    for seed in range(3):
        torch.manual_seed(seed)
        check(matmul.linear_tiled, ops.linear, torch.randn(2, 1104).to(dtype), torch.randn(150, 1104).to(dtype), None)
        same = lambda rows: torch.randn(rows, 1).to(dtype).expand(rows, 290)
        check(matmul.linear_tiled, ops.linear, same(70), same(16), None)


CODES = [
    # rows of x, outputs, K, format, group and what else there is
    (1, 1, 32, "int4"),
    (7, 70, 768, "int4", 32, "zero+bias"),
    (8, 33, 768, "int4", 384),
    (16, 40, 384, "int4", 128, "bias"),
    (3, 35, 704, "int4", 64, "zero"),
    (5, 17, 48, "int8", 0, "bias"),
    (9, 40, 400, "int8", 16, "zero"),
    (16, 65, 768, "int8", 64),
    (2, 33, 176, "fp8", 0, "bias"),
    (12, 40, 416, "fp8", 32),
    (8, 16, 0, "int8", 0, "bias"),
]
# Warps side by side, warps that share K and blocks that share K: one of each, some of each, more than there are stages.
SHARED_OUT = [(1, 1, 1), (2, 2, 2), (1, 8, 4)]


def by(shared_out):
    return functools.partial(weight_only.linear_weight_only, config=weight_only.Config(*shared_out))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sizes", CODES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_weights_of_codes(sizes, dtype):
    torch.manual_seed(0)
    arguments = ops.linear_weight_only.bind(**weight_only_case(Make(dtype, "cpu"), *sizes))
    for shared_out in SHARED_OUT:
        check(by(shared_out), ops.linear_weight_only, *arguments.values())


@pytest.mark.parametrize("group", [80, 96])
def test_groups_that_end_amid_a_stage_and_a_part_of_k(group):
    """Of 5 and 6 pieces of 16 codes, where a stage has 4 and a block's part of K 12."""
    torch.manual_seed(0)
    arguments = ops.linear_weight_only.bind(
        **weight_only_case(Make(HALVES[0], "cpu"), 2, 33, 8 * group, "int8", group, "zero")
    )
    check(by((1, 1, 4)), ops.linear_weight_only, *arguments.values())


def test_codes_of_tensors_that_lie_anyhow():
    """And scales and biases in other precisions than x."""
    torch.manual_seed(0)
    x, bias = torch.randn(64, 2, 3).bfloat16().permute(2, 1, 0), torch.randn(34)[::2]
    weight = torch.randint(-128, 128, (64 * 17 + 1,), dtype=torch.int8)[1:].view(64, 17).T
    scale = torch.rand(2, 17).half().T
    zero = torch.randint(-128, 128, (2, 17), dtype=torch.int8).T
    check(by((2, 2, 1)), ops.linear_weight_only, x, weight, scale, zero, bias)
    check(by((2, 2, 1)), ops.linear_weight_only, x, weight, scale, None, bias.half())


@pytest.mark.parametrize(
    "sizes", [(3, 17, 176, "fp8", 16, "bias"), (9, 40, 96, "int4", 32, "zero+bias")], ids=["fp8", "int4"]
)
def test_nothing_beyond_codes_and_scales_is_read(sizes):
    fences = Fences()
    given = {
        name: fences.around(tensor) for name, tensor in weight_only_case(Make(torch.float16, "cpu"), *sizes).items()
    }
    check(by((2, 2, 1)), ops.linear_weight_only, *ops.linear_weight_only.bind(**given).values())


@pytest.mark.parametrize("dtype", HALVES)
def test_every_code_of_fp8(dtype):
    weight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]  # two of them NaN
    for x in torch.eye(256, dtype=dtype).split(16):
        out = by((1, 1, 1))(x, weight, torch.ones(1, 1), None, None)
        assert torch.equal(out.isnan(), torch.full((16, 1), True))
    finite = weight.float().nan_to_num().to(weight.dtype)
    for x in torch.eye(256, dtype=dtype).split(16):
        check(by((1, 1, 1)), ops.linear_weight_only, x, finite, torch.ones(1, 1), None, None)


def test_nan_stays_in_its_row():
    """Of x, of codes and of scales, where the last stage of a row ends amid the next one's codes and scales."""
    torch.manual_seed(0)
    given = weight_only_case(Make(torch.bfloat16, "cpu"), 3, 3, 176, "fp8", 16)
    given["x"][1, 100] = given["scale"][1, 0] = torch.nan
    given["weight"].view(torch.uint8)[2, :16] = 127
    arguments = ops.linear_weight_only.bind(**given)
    out = by((1, 1, 1))(*arguments.values())
    assert out.isnan().tolist() == [[False, True, True], [True] * 3, [False, True, True]]
    check(by((1, 1, 1)), ops.linear_weight_only, *arguments.values())


@pytest.mark.parametrize("name", weight_only.CONFIGS)
def test_a_row_has_the_bits_of_small_integers_in_every_configuration(name):
    """Sums that halves hold, with scales that are powers of two: any code or scale in a wrong place is seen."""
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (9, 640)).bfloat16() * (torch.rand(9, 640) < 0.1)
    codes, zero = torch.randint(0, 16, (37, 640)), torch.randint(4, 12, (37, 5), dtype=torch.int8)
    scale = 2.0 ** torch.randint(-1, 1, (37, 5))
    out = by(weight_only.CONFIGS[name])(x, pack_int4(codes), scale, zero, None)
    numbers = (codes - zero.repeat_interleave(128, 1)) * scale.repeat_interleave(128, 1)
    expected = x.double() @ numbers.double().T
    assert expected.abs().max() < 128  # with one bit below the point, eight in all
    assert torch.equal(out.double(), expected)


PAGED = [  # the batch, page, heads, kv_heads, dim, dim of v, what pages hold, and what is else
    ("decode", 16, 4, 2, 128, 128),
    ("decode", 32, 8, 1, 64, 64, "same", "long"),
    ("uneven", 16, 3, 1, 64, 64, "same", "scaled"),
    ("nothing", 16, 2, 2, 64, 64),
    ("decode", 16, 4, 2, 128, 128, "float8_e4m3fn"),
    ("uneven", 48, 7, 1, 128, 128, "float8_e4m3fn", "scaled"),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sizes", PAGED, ids=lambda sizes: "x".join(map(str, sizes)))
def test_attention_over_pages(sizes, dtype):
    torch.manual_seed(0)
    arguments = ops.paged_attention.bind(**paged_case(Make(dtype, "cpu"), *sizes))
    assert paged_decode.takes(**{name: arguments[name] for name in inspect.signature(paged_decode.takes).parameters})
    config = paged_decode.CONFIGS["2 warps"]  # the tests below run the others
    for blocks in (config.blocks, 0):  # texts split, or whole
        launcher = functools.partial(paged_decode.paged_attention, config=config._replace(blocks=blocks))
        check(launcher, ops.paged_attention, *arguments.values())


def paged(*sizes, dtype=torch.bfloat16, **changed):
    torch.manual_seed(0)
    return ops.paged_attention.bind(**(paged_case(Make(dtype, "cpu"), *sizes) | changed))


def decode(arguments, config="4 warps", blocks=1):
    config = paged_decode.CONFIGS[config]._replace(blocks=blocks)
    return paged_decode.paged_attention(*arguments.values(), config=config)


OF_FP8 = ("decode", 16, 4, 2, 128, 128, "float8_e4m3fn")


def test_decoding_where_tokens_lie_anyhow():
    """Queries within a projection, pages of a layer within a cache whose heads come first, and tokens of no sequence."""
    arguments = paged("decode", 16, 4, 2, 128, 128)
    tokens = torch.randn(3, 8, 128).bfloat16()
    cache = torch.full((2, 2, *arguments["keys"].shape), torch.nan).bfloat16()
    cache[0, 1], cache[1, 1] = arguments["keys"], arguments["values"]
    heads_first = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in cache[:, 1]]
    arguments |= dict(q=tokens[:, :4], keys=heads_first[0], values=heads_first[1])
    check(lambda *given: decode(dict(enumerate(given))), ops.paged_attention, *arguments.values())
    short = arguments | dict(cu_queries=torch.tensor([0, 1, 1, 2], dtype=torch.int32))
    out = decode(short)
    assert torch.equal(out[2], torch.zeros(4, 128).bfloat16())
    check(lambda *given: decode(dict(enumerate(given))), ops.paged_attention, *short.values())


def in_order(x, *order):
    """The same numbers, lying in memory as if its dimensions came in another order."""
    return x.permute(order).contiguous().permute(sorted(range(x.ndim), key=order.__getitem__))


@pytest.mark.parametrize("cache", [(128, 128, "float8_e4m3fn"), (64, 64)], ids=["codes", "numbers"])
def test_decoding_where_each_tensor_lies_in_a_way_of_its_own(cache):
    """What is found by the strides of another tensor is seen, in pages of more than the 16 keys that are met at a time."""
    arguments = paged("decode", 32, 4, 2, *cache)
    lie = dict(
        q=in_order(arguments["q"], 1, 0, 2),
        keys=in_order(arguments["keys"], 0, 2, 1, 3),
        values=in_order(arguments["values"], 2, 1, 0, 3),
        block_tables=in_order(arguments["block_tables"], 1, 0),
        lengths=torch.stack((arguments["lengths"], arguments["lengths"] * 0), 1)[:, 0],
        cu_queries=torch.stack((arguments["cu_queries"], arguments["cu_queries"] * 0), 1)[:, 0],
    )
    if arguments["key_scale"] is not None:
        lie["key_scale"] = in_order(arguments["key_scale"], 1, 0, 2)
        lie["value_scale"] = in_order(arguments["value_scale"], 2, 0, 1)
    assert torch.equal(decode(arguments | lie), decode(arguments))


@pytest.mark.parametrize("cache", ["same", "float8_e4m3fn"])
def test_every_text_of_several_is_split_by_itself(cache):
    """Of sequences that share pages, and of several heads of keys; the counters are left as they were found."""
    arguments = paged("uneven", 16, 6, 2, 128, 128, cache)
    lengths = torch.tensor([300, 5, 129, 256], dtype=torch.int32)
    arguments |= dict(
        q=torch.randn(4, 6, 128).bfloat16(),
        block_tables=arguments["block_tables"].expand(4, -1),
        lengths=lengths,
        cu_queries=torch.arange(5, dtype=torch.int32),
    )
    for name in ("8 warps", "1 warp"):
        check(lambda *given: decode(dict(enumerate(given)), name, 8), ops.paged_attention, *arguments.values())


@pytest.mark.parametrize("cache", ["same", "float8_e4m3fn"])
def test_pages_beyond_what_32_bits_count(cache):
    """In memory of which only those pages are ever touched."""
    arguments = paged("decode", 16, 2, 1, 128, 128, cache)
    memory = torch.empty(len(arguments["keys"]) * 2**29, dtype=arguments["keys"].dtype)
    apart = {}
    for n, name in enumerate(("keys", "values")):
        pages = arguments[name]
        apart[name] = memory.as_strided(pages.shape, (2**29, *pages.stride()[1:]), n * pages[0].numel()).copy_(pages)
    assert (len(pages) - 1) * 2**29 >= 2**31
    assert torch.equal(decode(arguments | apart), decode(arguments))


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scores_of_any_scale(scale):
    for sizes in (OF_FP8, ("decode", 16, 4, 2, 128, 128)):
        arguments = paged(*sizes, scale=scale)
        check(lambda *given: decode(dict(enumerate(given))), ops.paged_attention, *arguments.values())


def test_tokens_of_no_sequence_are_zero():
    """More of them than there are sequences, and where there are none."""
    arguments = paged("decode", 16, 4, 2, 128, 128) | dict(q=torch.full((9, 4, 128), torch.nan).bfloat16())
    none = dict(block_tables=arguments["block_tables"][:0], lengths=arguments["lengths"][:0])
    for ends, changed in (([0, 0, 0, 0], {}), ([0], none)):
        changed = arguments | changed | dict(cu_queries=torch.tensor(ends, dtype=torch.int32))
        with poisoned_memory():
            assert not decode(changed).any()
    part = arguments | dict(q=torch.randn(9, 4, 128).bfloat16())
    with poisoned_memory():
        out = decode(part)
    assert not out[3:].any()
    assert torch.equal(out[:3], decode(part | dict(q=part["q"][:3])))


def test_nothing_beyond_pages_tables_and_scales_is_read():
    fences = Fences()
    for sizes in (OF_FP8, ("uneven", 16, 2, 1, 64, 64)):
        given = {
            name: fences.around(each) if isinstance(each, torch.Tensor) else each
            for name, each in paged(*sizes).items()
        }
        check(lambda *given: decode(dict(enumerate(given))), ops.paged_attention, *given.values())


@pytest.mark.parametrize("name", ["keys", "values", "key_scale", "value_scale"])
def test_nan_stays_in_its_sequence(name):
    arguments = paged(*OF_FP8)
    before, length = decode(arguments), arguments["lengths"][1]
    page = arguments["block_tables"][1, (length - 1) // 16]
    wrong = arguments[name].clone()
    if name.endswith("scale"):
        wrong[page, (length - 1) % 16] = torch.nan
    else:
        wrong.view(torch.uint8)[page, (length - 1) % 16] = 127
    out = decode(arguments | {name: wrong})
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], before[[0, 2]])


def test_scales_of_codes_far_from_each_other():
    """A value whose scale is a thousand times the others', and one of nothing but zeros, wherever they come."""
    for place in (0, 17, 36):
        arguments = paged(*OF_FP8)
        table, scale = arguments["block_tables"][1], arguments["value_scale"].clone()
        scale[table[place // 16], place % 16] *= 1000
        scale[table[(36 - place) // 16], (36 - place) % 16] = 0
        arguments["value_scale"] = scale
        check(lambda *given: decode(dict(enumerate(given)), "2 warps"), ops.paged_attention, *arguments.values())


def test_scores_that_rise_with_every_key():
    """What was added up is scaled anew again and again."""
    for dtype in HALVES:
        arguments = paged("uneven", 16, 2, 1, 64, 64, dtype=dtype)
        arguments["q"][:] = 1
        for n, page in enumerate(arguments["block_tables"][0, :19].tolist()):
            arguments["keys"][page] = (torch.arange(16)[:, None, None] + 16 * n) / 16
        check(lambda *given: decode(dict(enumerate(given))), ops.paged_attention, *arguments.values())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(most_queries=2), "one new token of every sequence"),
        (dict(window=8), "no window and no softcap"),
        (dict(block_tables=torch.zeros(3, 4, dtype=torch.int64)), "indices are all of one dtype"),
        (dict(q=torch.zeros(3, 18, 128).bfloat16()), "at most 8 heads share keys"),
        (dict(q=torch.zeros(3, 4, 129).bfloat16()[..., 1:]), "pieces of 16 bytes"),
    ],
)
def test_what_is_left_to_triton(changed, reason):
    arguments = paged("decode", 16, 4, 2, 128, 128, **changed)
    names = inspect.signature(paged_decode.takes).parameters
    assert reason in str(paged_decode.takes(**{name: arguments[name] for name in names}))


def test_queries_over_pages_are_halves():
    """Of float32, in pages of the same, the kernel would take the bits for those of float16."""
    way = ops.paged_attention.implementations["cuda"]
    assert set(way.accepted("q", torch.zeros(1))) == set(HALVES)


MODELS = {
    # layout, what differs in the model, and texts of how many tokens
    "norms, tied": ((2, 2), dict(family="qwen3", qk_norm="head", tied=True), (1, 17, 77)),
    "one wide key for several clusters": ((2, 4), dict(kv_heads=1, head_dim=128), (150,)),
    "several keys for a cluster": ((2, 2), dict(kv_heads=4), (301,)),
    "more blocks to a cluster than clusters": ((4, 2), dict(), (5, 140)),
    "all threads look, more than once": ((2, 8), dict(hidden=1024, heads=8, kv_heads=8, layers=1), (3, 40)),
    "codes": ((2, 2), dict(family="qwen3", qk_norm="head", tied=True, intermediate=768), (1, 77)),
    "codes, one wide key for several clusters": ((2, 4), dict(kv_heads=1, head_dim=128), (150,)),
}


@torch.no_grad()
@pytest.mark.parametrize(("layout", "changed", "lengths"), MODELS.values(), ids=MODELS)
def test_a_decode_step(monkeypatch, request, layout, changed, lengths):
    torch.manual_seed(0)
    sizes = dict(vocabulary=75, hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, head_dim=64, positions=512)
    decoder = models.Decoder(ModelConfig(**(sizes | changed))).to(torch.bfloat16).eval()
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if request.node.callspec.id.startswith("codes"):
        quantise_weights(decoder, "fp8")
    step = step_of(monkeypatch, decoder, layout)
    for length in lengths:
        check_step(decoder, step, length)


def test_bits_of_a_code_are_a_power_of_two_of_its_number():
    """As decode_step.cu moves them into bfloat16, with room below and above for what they are multiplied with."""
    codes = torch.arange(256)
    moved = (codes & 0x80) << 8 | (codes & 0x7F) << 4
    numbers = (moved << 16).to(torch.int32).view(torch.float32).double()
    expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    expected[codes % 128 == 127] = torch.tensor([480.0, -480.0]).double()
    assert torch.equal(numbers * 2.0**120, expected)
    smallest, largest = numbers[numbers > 0].min(), numbers.max()
    info = torch.finfo(torch.float32)
    for x in (2.0**-61, 2.0**63):  # and the rest of rounding them, in a row as long as any
        assert x * 2.0**64 < torch.finfo(torch.bfloat16).max
        assert largest * x * 2.0**64 * 2**15 < info.max
        assert smallest * x * 2.0**64 >= info.smallest_normal


@torch.no_grad()
def test_a_decode_step_of_all_codes_and_large_numbers(monkeypatch):
    """Codes without a leading one too, of which rounded weights have next to none, and a residual stream as large as trained
    models have."""
    torch.manual_seed(0)
    sizes = dict(vocabulary=75, hidden=256, intermediate=512, layers=1, heads=4, kv_heads=2, head_dim=64, positions=512)
    decoder = models.Decoder(ModelConfig(**sizes)).to(torch.bfloat16).eval()
    decoder.embedding.weight[:, 3] = 30_000
    quantise_weights(decoder, "fp8")
    every = torch.arange(256, dtype=torch.uint8)
    small = every[every % 128 < 8]
    for layer, some in zip(linears_of(decoder.layers[0]), (small, every[every % 128 < 127], small, small), strict=True):
        codes = some[torch.randint(len(some), layer.codes.shape)].view(torch.float8_e4m3fn)
        layer.codes = codes
        layer.code_scale = codes.float().square().mean(1, keepdim=True).rsqrt() * codes.shape[1] ** -0.5
    check_step(decoder, step_of(monkeypatch, decoder, (2, 2)), 40)


def step_of(monkeypatch, decoder, layout):
    monkeypatch.setattr(decode_step, "LAYOUTS", (layout,))
    monkeypatch.setattr(decode_step, "device_refused", lambda _: "")
    config = decoder.config
    return decode_step.DecodeStep(
        shape_of(config, has_codes(decoder)), [weights_of(layer) for layer in decoder.layers], decoder.embedding.weight,
        decoder.head_weight, decoder.norm.weight, eps=config.norm_eps, scale=config.head_dim**-0.5,
    )  # fmt: skip


def check_step(decoder, step, length, page=16):
    """Logits nearer to those of float64 than plain bfloat16's, and the new token's keys and values in their place."""
    config, exact = decoder.config, copy.deepcopy(decoder).double()
    unpack_codes(exact)
    blocks = -(-length // page)
    ours, usual, wide = (
        PagedCache(config, blocks + 3, page, t) for t in (torch.bfloat16, torch.bfloat16, torch.float64)
    )
    for mine, theirs, true in zip(ours.tensors(), usual.tensors(), wide.tensors(), strict=True):
        true.copy_(theirs.copy_(mine.normal_()))
    before = [mine.clone() for mine in ours.tensors()]
    pages = torch.randperm(blocks + 2)[None, :blocks] + 1
    ids, lengths = torch.tensor([7]), torch.tensor([length])

    def plain(model, cache):
        batch = PagedBatch(cache, pages, lengths, torch.tensor([0, 1]), tokens=1, most_queries=1)
        return model.logits(model.hidden(ids, context=batch)).double()

    (cos, sin), _ = decoder.rotary(512)
    truth = plain(exact, wide)
    error = lambda logits: float((logits - truth).norm())
    found = error(step(ids, lengths, pages[0], ours.keys, ours.values, cos, sin))
    assert found < error(plain(decoder, usual))
    for kept, true, old in zip(ours.tensors(), wide.tensors(), before, strict=True):
        torch.testing.assert_close(
            kept[0].double(), true[0], rtol=2**-8, atol=1e-6
        )  # rounded, on the first layer, once
        written = {tuple(place) for place in (kept != old).nonzero()[:, 1:3].tolist()}
        assert written == {(int(pages[0, -1]), (length - 1) % page)}

"""What `auto` takes: buckets of sizes, and tables made from measured rows."""

import itertools
import json

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract import registry
from tilestack.contract.cases import Make
from tilestack.tuning import preferences

registry.load_kernels()  # whose names the tables have


def arguments_of(*shape, dtype=torch.bfloat16):
    return dict(x=torch.empty(shape, dtype=dtype, device="meta"), dim=-1)


def row(backend, time_us, direction="forward", case="8192x4096x-1", op="softmax", dtype="bfloat16"):
    return dict(op=op, case=case, dtype=dtype, direction=direction, backend=backend, time_us=time_us)


@pytest.mark.parametrize(
    ("shape", "bucket"),
    [((8192, 4096), "25x12"), ((8192, 5120), "25x12"), ((4096, 4097), "24x12"), ((8192, 4095), "24x11"), ((), "0x0")],
)
def test_a_bucket_is_the_powers_of_two_of_elements_and_columns(shape, bucket):
    assert preferences.bucket_of(ops.softmax, arguments_of(*shape)) == ("bfloat16", bucket)


def test_empty_tensors_have_a_bucket():
    assert preferences.bucket_of(ops.softmax, arguments_of(3, 0)) == ("bfloat16", "0x0")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
    ],
)
def test_a_gpu_is_named_for_its_files(name, slug):
    assert preferences.gpu_slug(name) == slug


def test_a_table_answers_by_bucket_and_otherwise_by_default():
    table = {"softmax": {"default": ["triton"], "bfloat16": {"25x12": ["aten", "triton"]}}}
    ask = lambda operator, arguments: preferences.look_up(table, operator, arguments)
    assert ask(ops.softmax, arguments_of(8192, 4096)) == ["aten", "triton"]
    assert ask(ops.softmax, arguments_of(8192, 8192)) == ["aten", "triton"], "the nearest bucket"
    assert ask(ops.softmax, arguments_of(8192, 4096, dtype=torch.float32)) == ["triton"]
    assert ask(ops.softmax, {"dim": -1}) == ["triton"], "a backward may not have kept x"


def test_bfloat16_speaks_for_float16_until_that_is_measured():
    entry = {"default": ["triton"], "bfloat16": {"25x12": ["aten"]}, "bfloat16 forward": {"25x12": ["mine"]}}
    half = arguments_of(8192, 4096, dtype=torch.float16)
    ask = lambda **more: [
        preferences.look_up({"softmax": entry | more}, ops.softmax, half, with_gradient)
        for with_gradient in (True, False)
    ]
    assert ask() == [["aten"], ["mine"]]
    assert ask(**{"float16 forward": {"22x8": ["triton", "aten"]}}) == [["aten"], ["triton", "aten"]]
    assert ask(float16={"22x8": ["triton", "aten"]}) == [["triton", "aten"]] * 2
    single = arguments_of(8192, 4096, dtype=torch.float32)
    assert preferences.look_up({"softmax": entry}, ops.softmax, single) == ["triton"]


@pytest.mark.parametrize("table", [{}, preferences.table_of("h200")], ids=["unmeasured", "h200"])
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize(("rows", "taken"), [(8, "triton_split_k"), (8192, "triton_parts")])
def test_a_gated_layer_of_many_rows_goes_through_the_fastest_product(table, with_gradient, rows, taken):
    make = Make(torch.bfloat16, "meta")
    arguments = ops.linear_swiglu.bind(make.normal(rows, 4096), make.normal(2 * 14336, 4096))
    ranked = preferences.look_up(table, ops.linear_swiglu, arguments, with_gradient)
    ways = (ops.linear_swiglu.implementations[name.partition(":")[0]] for name in ranked)
    assert next(way.backend for way in ways if way.when is None or way.when(arguments["x"]) is True) == taken


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (ops.attention, lambda make: dict.fromkeys("qkv", make.normal(8, 2048, 16, 128))),
        (ops.linear, lambda make: dict(x=make.normal(8, 4096), weight=make.normal(4096, 4096))),
        (
            ops.grouped_linear,
            lambda make: dict(x=make.normal(8192, 1024), weight=make.normal(8, 768, 1024), offsets=None),
        ),
    ],
)
def test_the_half_precisions_take_the_same_backends_on_an_h200(op, arguments):
    half, brain = (
        preferences.look_up(preferences.table_of("h200"), op, op.bind(**arguments(Make(dtype, "meta"))), False)
        for dtype in (torch.float16, torch.bfloat16)
    )
    assert half == brain


def test_the_nearest_bucket_with_the_same_words_speaks():
    measured = ["6x12x12x7 causal", "6x14x14x7 causal", "6x12x12x7 full", "25x12"]
    assert preferences.nearest("6x13x13x7 causal", measured) == "6x12x12x7 causal"
    assert preferences.nearest("6x14x15x7 causal", measured) == "6x14x14x7 causal"
    assert preferences.nearest("3x14x14x6 full", measured) == "6x12x12x7 full"
    assert preferences.nearest("6x12x12x7 causal documents", measured) is None
    assert preferences.nearest("20x10", measured) == "25x12"


def test_an_operator_names_what_its_speed_depends_on():
    shape = lambda *size: torch.empty(size, dtype=torch.bfloat16, device="meta")
    linear = lambda m, n, k: preferences.bucket_of(ops.linear, dict(x=shape(m, k), weight=shape(n, k), bias=None))
    assert linear(4096, 1024, 2048) == ("bfloat16", "12x10x11")
    assert linear(4096, 4096, 2048) != linear(4096, 1024, 2048)
    attention = lambda causal, queries=4096: preferences.bucket_of(
        ops.attention,
        ops.attention.bind(shape(4, queries, 16, 128), shape(4, 4096, 8, 128), shape(4, 4096, 8, 128), causal=causal),
    )
    assert attention(True) == ("bfloat16", "6x12x12 dim128 causal")
    assert attention(False) == ("bfloat16", "6x12x12 dim128 full")
    assert attention(False, 1) == ("bfloat16", "6x0x12 dim128 full")
    strided = lambda step: preferences.bucket_of(ops.strided_copy, dict(x=shape(8192, 32768), step=step))
    assert strided(2) == ("bfloat16", "28x15x1")
    assert strided(16) == ("bfloat16", "28x15x4")


def test_a_product_of_codes_is_found_by_the_dtype_of_its_codes():
    times = dict(op="linear_int8", case="8192x8192x8192xplain")
    rows = [row("gluon", 1.0, **times), row("triton", 2.0, **times)]
    rows += [row("gluon", 9.0, op="linear_int8", case="16x14336x4096xplain"), row("triton", 2.0, op="linear_int8", case="16x14336x4096xplain")]  # fmt: skip
    codes = lambda *size: torch.empty(size, dtype=torch.int8, device="meta")
    scale = lambda size: torch.empty(size, device="meta")
    ask = lambda m, n, k: preferences.look_up(
        preferences.make_table(rows),
        ops.linear_int8,
        ops.linear_int8.bind(codes(m, k), codes(n, k), scale(m), scale(n)),
    )
    assert ask(8192, 8192, 8192) == ["gluon", "triton"]
    assert ask(16, 14336, 4096) == ["triton", "gluon"]


@pytest.mark.usefixtures("outside")
def test_a_configuration_is_the_one_that_measured_fastest(monkeypatch):
    given = []
    configs = {"tall": dict(BLOCK=128), "wide": dict(BLOCK=64)}
    implement = contract.implements(
        ops.softmax, backend="mine", configs=configs, backward=lambda grad, out, config: given.append(config) or grad
    )
    implement(lambda x, dim, config: given.append(config) or torch.softmax(x, dim))
    x = torch.randn(4, 8, requires_grad=True)
    with contract.backend("mine"):
        ops.softmax(x).sum().backward()
        assert given == [configs["tall"]] * 2, "the first where nothing is known"
        given.clear()
        monkeypatch.setattr(registry, "_preference", lambda *_: ["aten", "mine:wide", "mine:tall"])
        monkeypatch.setattr(type(ops.softmax), "device_of", lambda op, arguments: torch.device("cuda"))
        ops.softmax.plans.clear()
        ops.softmax(x.detach())
    assert given == [configs["wide"]]


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_configuration_chosen_by_name_is_that_of_the_forward_and_its_gradient(compiled):
    given = []
    configs = {"tall": dict(BLOCK=128), "wide": dict(BLOCK=64)}
    contract.implements(
        ops.softmax,
        backend="mine",
        configs=configs,
        backward=lambda grad, out, config: given.append(config) or grad * 1,
    )(lambda x, dim, config: given.append(config) or torch.softmax(x, dim))
    x = torch.randn(4, 8, requires_grad=True)
    run = torch.compile(lambda x: ops.softmax(x), backend="aot_eager") if compiled else ops.softmax
    with contract.backend("", softmax="mine:wide"):
        out = run(x)
    out.sum().backward()
    assert given == [configs["wide"]] * 2
    with (
        pytest.raises(contract.BackendError, match="softmax on mine has no configuration 'low'; it has tall, wide"),
        contract.backend("", softmax="mine:low"),
    ):
        ops.softmax(x)


def test_a_configuration_is_ranked_by_name():
    rows = [row("triton", 10.0) | dict(config="tall"), row("triton", 8.0) | dict(config="wide"), row("aten", 9.0)]
    assert preferences.make_table(rows)["softmax"]["default"] == ["triton:wide", "aten", "triton:tall"]


def test_without_a_table_pytorch_is_preferred_for_what_its_libraries_do_best():
    assert preferences.look_up({}, ops.softmax, arguments_of(8, 8)) == []
    assert preferences.look_up({}, ops.linear, {}) == ["aten"]
    assert preferences.look_up({}, ops.attention, {}) == ["aten"]
    assert preferences.table_of("no-such-gpu") == {}


def test_symbolic_sizes_ask_for_the_default_only():
    asked = []

    def compiled(graph, inputs):
        fake = next(node for node in graph.graph.nodes if node.op == "placeholder" and "example_value" in node.meta
                    and isinstance(node.meta["example_value"], torch.Tensor))  # fmt: skip
        asked.append(preferences.bucket_of(ops.softmax, {"x": fake.meta["example_value"]}))
        return graph.forward

    torch.compile(lambda x: x + 1, backend=compiled, dynamic=True)(torch.randn(8, 16))
    assert asked == [("", "")]


def test_the_table_ranks_by_forward_and_backward_together():
    rows = [
        row("triton", 10.0), row("triton", 50.0, "backward"),
        row("aten", 20.0), row("aten", 30.0, "backward"),
        row("torch", 15.0), row("torch", None, "backward"),
        row("liger", 1.0), row("liger", 1.0, "backward"),
        row("triton", 1.0, "both"),
    ]  # fmt: skip
    table = preferences.make_table(rows)
    both, forward = ["aten", "triton"], ["triton", "torch", "aten"]
    assert table == {"softmax": {"default": both, "bfloat16": {"25x12": both}, "bfloat16 forward": {"25x12": forward}}}
    ask = lambda columns, **gradient: preferences.look_up(table, ops.softmax, arguments_of(8192, columns), **gradient)
    assert ask(4096) == both
    assert ask(4096, with_gradient=False) == forward


def test_without_gradients_the_nearest_bucket_of_both_rankings_speaks():
    entry = {
        "default": [],
        "bfloat16": {"25x12": ["aten"], "15x12": ["aten"]},
        "bfloat16 forward": {"15x12": ["triton"]},
    }
    ask = lambda rows: preferences.look_up(
        {"softmax": entry}, ops.softmax, arguments_of(rows, 4096), with_gradient=False
    )
    assert ask(8) == ["triton"]
    assert ask(8192) == ["aten"]


def test_a_forward_measured_alone_says_nothing_of_calls_with_gradients():
    rows = [row("triton", 10.0) | dict(forward_only=True), row("aten", 20.0) | dict(forward_only=True)]
    table = preferences.make_table(rows)
    assert table == {"softmax": {"default": ["triton", "aten"], "bfloat16 forward": {"25x12": ["triton", "aten"]}}}


def test_the_default_weighs_every_case_alike_whatever_its_size():
    rows = [
        row("triton", 2000.0), row("aten", 1900.0),
        row("triton", 10.0, case="8192x1024x-1"), row("aten", 30.0, case="8192x1024x-1"),
    ]  # fmt: skip
    entry = preferences.make_table(rows)["softmax"]
    assert entry["bfloat16"] == {"25x12": ["aten", "triton"], "23x10": ["triton", "aten"]}
    assert entry["default"] == ["triton", "aten"]


@pytest.mark.parametrize(("ours", "ranked"), [(10.0, ["triton", "aten"]), (15.0, ["aten", "triton"])])
def test_a_backend_that_refuses_some_cases_is_ranked_by_the_others(ours, ranked):
    rows = [
        row("triton", ours), row("aten", 12.0),
        row("aten", 20.0, case="8192x5120x-1"),  # of the same bucket
    ]  # fmt: skip
    entry = preferences.make_table(rows)["softmax"]
    assert entry["bfloat16"]["25x12"] == ranked == entry["default"]


def test_rows_of_a_case_that_is_gone_are_passed_over():
    assert preferences.make_table([row("triton", 1.0, case="1x2x3x4")]) == {}


def test_auto_follows_a_written_table(tmp_path, monkeypatch):
    monkeypatch.setattr(preferences, "TABLES", tmp_path)
    results = {"machine": {"slug": "h200"}, "rows": [row("aten", 5.0), row("triton", 9.0)]}
    path = preferences.write_table(results, tmp_path)
    assert path.name == "h200.json"
    assert json.loads(path.read_text())["softmax"]["default"] == ["aten", "triton"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    ops.operators()  # loads the kernels, which install the tables
    candidates = registry.candidates(ops.softmax, arguments_of(8192, 4096), torch.device("cuda"), True)
    assert [c.backend for c in candidates][:2] == ["aten", "triton"]
    candidates = registry.candidates(ops.relu, dict(x=torch.empty(4, device="meta")), torch.device("cuda"), True)
    assert [c.backend for c in candidates] == ["triton"]
    preferences.table_of.cache_clear()


def test_what_only_a_search_has_measured_stays_in_a_table(tmp_path):
    measure = lambda rows: json.loads(
        preferences.write_table({"machine": {"slug": "h200"}, "rows": rows}, tmp_path).read_text()
    )
    assert list(measure([row("aten", 5.0), row("triton", 9.0)])["softmax"]["bfloat16"]) == ["25x12"]
    preferences.add_to_table(tmp_path / "h200.json", [row("triton", 1.0, case="16384x256x-1"), row("aten", 2.0, case="16384x256x-1")])  # fmt: skip
    preferences.add_to_table(tmp_path / "h200.json", [row("triton", 1.0) | dict(op="relu", case="4096x16384")])
    found = measure([row("aten", 9.0), row("triton", 5.0)])
    assert found["softmax"]["bfloat16"] == {"22x8": ["triton", "aten"], "25x12": ["triton", "aten"]}
    assert found["softmax"]["default"] == ["aten", "triton"]  # which was there, and is not of these rows alone
    assert found["relu"]["default"] == ["triton"]


def test_a_run_renews_the_buckets_that_it_measured_and_leaves_what_a_search_found_elsewhere(tmp_path):
    """Older rows of other cases stay in the results; the table has learned more of them since."""
    searched = [row("triton", 1.0, case="16384x256x-1"), row("aten", 2.0, case="16384x256x-1")]
    preferences.add_to_table(tmp_path / "h200.json", searched)
    rows = [
        row("aten", 5.0), row("triton", 9.0), row("aten", 5.0, "backward"), row("triton", 9.0, "backward"),
        row("aten", 1.0, "backward", case="8192x5120x-1"), row("aten", 1.0, case="8192x5120x-1"),  # of the same bucket
        row("triton", 9.0, case="16384x256x-1"), row("aten", 1.0, case="16384x256x-1"),
        row("triton", 9.0, case="8192x1024x-1"), row("aten", 8.0, case="8192x1024x-1"),
    ]  # fmt: skip
    results = {"machine": {"slug": "h200"}, "rows": rows}
    measured = {("softmax", "8192x4096x-1", "bfloat16"), ("softmax", "no such case", "bfloat16")}
    found = json.loads(preferences.write_table(results, tmp_path, measured).read_text())["softmax"]
    assert found["bfloat16"] == {"22x8": ["triton", "aten"], "25x12": ["aten", "triton"]}
    assert found["bfloat16 forward"] == {"25x12": ["aten", "triton"]}

    forward_alone = {("softmax", "8192x1024x-1", "bfloat16")}
    found = json.loads(preferences.write_table(results, tmp_path, forward_alone).read_text())["softmax"]
    assert "23x10" not in found["bfloat16"], "whose backward nobody measured"
    assert found["bfloat16 forward"]["23x10"] == ["aten", "triton"]


def test_auto_leaves_what_is_not_deterministic_alone_where_bits_are_to_repeat(monkeypatch):
    ops.operators()  # which installs the tables
    monkeypatch.setattr(registry, "_preference", lambda *_: ["gluon", "aten"])
    names = lambda: [c.backend for c in registry.candidates(ops.attention, {}, torch.device("cuda"), True)]
    assert names() == ["gluon", "aten", "triton"]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert names() == ["aten", "triton"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_words_alone_are_a_bucket_too():
    measured = {" causal": ["aten"], " full": ["triton"], "3 full": ["mine"]}
    assert preferences.nearest(" causal", measured) == " causal"
    assert preferences.nearest(" full", measured) == " full"
    assert preferences.nearest(" other", measured) is None


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("key", [7, (7.5,), (None,)])
def test_a_tuning_key_of_another_kind_is_refused(key, monkeypatch):
    monkeypatch.setattr(ops.softmax, "tuning_key", lambda x: key)
    with pytest.raises(TypeError, match="the tuning_key of softmax answers a tuple of whole numbers and words, not"):
        preferences.bucket_of(ops.softmax, arguments_of(8, 8))


def test_a_configuration_belongs_to_its_backend():
    assert registry.config_in("mine:wide", "mine") == "wide"
    assert registry.config_in("other:wide", "mine") == ""
    assert registry.config_in("mine", "mine") == ""


@pytest.mark.usefixtures("outside")
def test_what_was_measured_has_the_configurations_of_calls_of_its_kind():
    """A call without gradients may take another configuration than one with them."""
    known = {"default": [], "bfloat16": {"4x12": ["triton:a"]}, "bfloat16 forward": {"4x12": ["triton:b"]}}
    table = {"default": [], "bfloat16": {"4x12": ["aten", "triton"]}, "bfloat16 forward": {"4x12": ["triton"]}}
    found = preferences.with_configs({"linear": table}, {"linear": known})["linear"]
    assert found["bfloat16"] == {"4x12": ["aten", "triton:a"]}
    assert found["bfloat16 forward"] == {"4x12": ["triton:b"]}


def test_a_new_table_counts_from_the_next_call_on(tmp_path, monkeypatch):
    monkeypatch.setattr(preferences, "TABLES", tmp_path)
    machine = dict(slug="tested")
    for fastest, other in (("triton", "aten"), ("aten", "triton")):
        ops.softmax(torch.ones(2))
        assert len(ops.softmax.plans)
        preferences.write_table(dict(machine=machine, rows=[row(fastest, 1.0), row(other, 9.0)]), tmp_path)
        assert preferences.table_of("tested")["softmax"]["default"] == [fastest, other]
        assert not len(ops.softmax.plans)


def test_on_a_cpu_auto_takes_pytorch_s_own_function_and_else_the_definition():
    taken = lambda op, *arguments: op.resolve(op.bind(*arguments)).backend
    assert taken(ops.softmax, torch.zeros(2, 3)) == "aten"
    assert taken(ops.softmax, torch.zeros(1, 9000)) == "torch"  # of rows as long PyTorch's own loses digits
    assert taken(ops.swiglu, torch.zeros(2, 4)) == "torch"  # PyTorch has none
    assert taken(ops.softmax, torch.zeros(2, 3, device="meta")) == "torch"
    with contract.backend(softmax="torch"):
        assert taken(ops.softmax, torch.zeros(2, 3)) == "torch"


@pytest.mark.parametrize("path", sorted(preferences.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_name_backends_and_configurations_that_there_are(path):
    known = {
        (op.name, way): implementation.configs
        for op in ops.operators()
        for way, implementation in op.implementations.items()
    }
    for op, entry in preferences.read_table(path).items():
        rankings = [
            entry["default"],
            *(r for buckets in entry.values() if isinstance(buckets, dict) for r in buckets.values()),
        ]
        for name in itertools.chain.from_iterable(rankings):
            way, _, config = name.partition(":")
            assert (op, way) in known, f"{op} has no backend {way}"
            assert not config or config in known[op, way], f"{op} has no configuration {name}"


@pytest.mark.parametrize("path", sorted(preferences.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_hold_the_buckets_of_cases_that_are_measured_and_no_others(path):
    """Nothing renews an entry that no case is measured for, and it speaks for all sizes that it is the nearest to."""
    strays = []
    for name, entry in preferences.read_table(path).items():
        op = registry.operator_named(name)
        measured = {
            preferences.bucket_of(op, op.bind(**case.build(Make(dtype, "meta"))))
            for case in op.cases
            for dtype in (torch.bfloat16, torch.float32)
            if case.kind == "bench"
        }
        ranked = [(dtype, bucket) for dtype, buckets in entry.items() if dtype != "default" for bucket in buckets]
        strays += [(name, *found) for found in ranked if (found[0].removesuffix(" forward"), found[1]) not in measured]
    assert not strays

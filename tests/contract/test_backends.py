"""Choosing a backend: how choices are written, which layer wins, and what people are told when one cannot run."""

import subprocess
import sys
import threading

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract import BackendError, backend, backends, configure_backend, registry
from tilestack.contract.backends import Choice, chosen

pytestmark = pytest.mark.usefixtures("outside")

X = torch.randn(3, 5)


@pytest.fixture
def environment(monkeypatch):
    def choose(text):
        monkeypatch.setenv(backends.ENVIRONMENT_VARIABLE, text)
        backends._environment.cache_clear()
        registry.forget_plans()

    return choose


@pytest.fixture
def ran():
    """Two backends of relu that compute nothing special but say that they ran."""
    log = []
    for name in ("here", "there"):
        contract.implements(ops.relu, backend=name)(lambda x, name=name: log.append(name) or torch.relu(x))
    return log


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("", Choice()),
        ("triton", Choice("triton")),
        ("triton,softmax=torch", Choice("triton", (("softmax", "torch"),))),
        (" softmax = torch , triton ", Choice("triton", (("softmax", "torch"),))),
        ("softmax=torch,relu=aten", Choice(None, (("softmax", "torch"), ("relu", "aten")))),
    ],
)
def test_a_choice_is_read(text, choice):
    assert Choice.parse(text) == choice


@pytest.mark.parametrize("text", ["triton,torch", "softmax=", "=torch", "triton,="])
def test_what_is_no_choice_is_quoted_with_the_way_to_write_one(text):
    with pytest.raises(BackendError, match=rf"{text!r}: write `triton` or `triton,softmax=torch`"):
        Choice.parse(text)


def test_a_choice_that_is_no_text_is_refused():
    with (
        pytest.raises(BackendError, match="a backend is given by its name, such as `triton`, not by None"),
        backend(None),
    ):
        pass


def test_context_over_environment_over_configuration_over_auto(environment):
    assert chosen("softmax") == "auto"
    configure_backend("aten")
    assert chosen("softmax") == "aten"
    environment("triton,relu=torch")
    assert (chosen("softmax"), chosen("relu")) == ("triton", "torch")
    with backend("torch"):
        assert chosen("softmax") == "torch"
    with backend(softmax="torch"):
        assert (chosen("softmax"), chosen("gelu"), chosen("relu")) == ("torch", "triton", "torch")
    with backend("auto"):
        assert chosen("softmax") == "auto"


def test_an_exception_alone_leaves_the_rest_to_the_layer_below(environment):
    configure_backend("aten")
    environment("softmax=torch")
    assert (chosen("softmax"), chosen("relu")) == ("torch", "aten")


def test_contexts_nest_and_end_even_by_an_exception():
    with backend("triton", softmax="torch"):
        with backend(relu="aten"):
            assert [chosen(name) for name in ("softmax", "relu", "gelu")] == ["torch", "aten", "triton"]
        with pytest.raises(ZeroDivisionError), backend("aten"):
            1 / [chosen(name) for name in ("softmax", "relu", "gelu")].count("triton")
        assert [chosen(name) for name in ("softmax", "relu", "gelu")] == ["torch", "triton", "triton"]
    assert chosen("softmax") == "auto"


def test_calls_follow_each_change_of_choice(ran, environment):
    with torch.no_grad():
        configure_backend("relu=here")
        ops.relu(X)
        configure_backend("relu=there")
        ops.relu(X)
        for name in ("here", "there", "here"):
            with backend(relu=name):
                ops.relu(X)
        environment("relu=here")
        ops.relu(X)
    assert ran == ["here", "there", "here", "there", "here", "here"]


def test_a_context_stays_in_its_thread(ran):
    entered, leave = threading.Event(), threading.Event()

    def elsewhere():
        with backend(relu="there"):
            entered.set()
            leave.wait(120)
            ops.relu(X)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert entered.wait(120)
    assert chosen("relu") == "auto"
    with backend(relu="here"):
        ops.relu(X)
        leave.set()
        thread.join()
        ops.relu(X)
    assert ran == ["here", "there", "here"]


def test_the_environment_chooses_in_a_fresh_process():
    program = "import torch; from tilestack import ops; ops.softmax(torch.ones(2)); ops.relu(torch.ones(2))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"TILESTACK_BACKEND": "gluon,softmax=torch", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    reason = "relu has no gluon backend (Gluon kernels need a CUDA tensor, not one on cpu); it has torch, "
    assert reason in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "choose", [lambda: backend(sofmax="torch").__enter__(), lambda: configure_backend("sofmax=torch")]
)
def test_a_misspelt_operator_is_an_error_with_a_suggestion(choose):
    with pytest.raises(BackendError, match=r"no operator is named 'sofmax'; did you mean softmax\?"):
        choose()
    assert chosen("softmax") == "auto"


def test_a_misspelt_operator_in_the_environment_is_told_at_the_first_call(environment):
    environment("triton,quicksort=torch")
    with pytest.raises(BackendError, match=r"no operator is named 'quicksort'; there are .*add, .*softmax"):
        ops.softmax(X)


def test_an_unknown_backend_is_told_with_those_there_are():
    with (
        backend("trition"),
        pytest.raises(BackendError, match="softmax has no trition backend; it has torch, aten, cuda, triton"),
    ):
        ops.softmax(X)


def test_names_of_backends_can_be_checked_before_anything_is_called():
    for known in (
        "",
        "auto",
        "triton",
        "torch,softmax=triton",
        "triton,adamw=torch",
        "triton:tall,linear=triton_naive",
    ):
        registry.refuse_unknown_backends(known)
    with pytest.raises(BackendError, match="no backend is named 'trition'; did you mean triton"):
        registry.refuse_unknown_backends("trition")
    with pytest.raises(BackendError, match="no backend of softmax is named 'gluon'; there are aten, auto, cuda, torch"):
        registry.refuse_unknown_backends("triton,softmax=gluon")


def test_a_misspelt_operator_of_the_module_is_an_error_with_a_suggestion():
    with pytest.raises(AttributeError, match=r"tilestack\.ops has no sofmax; did you mean softmax"):
        ops.sofmax  # noqa: B018
    with pytest.raises(AttributeError, match=r"tilestack\.ops has no xyzzy$"):
        ops.xyzzy  # noqa: B018
    assert not hasattr(ops, "__wrapped__")


def refusing(**limits):
    return contract.implements(ops.softmax, backend="limited", **{"backward": contract.AUTOGRAD} | limits)(
        torch.softmax
    )


def contiguous_rows(x):
    return x.stride(-1) == 1 or f"rows must be contiguous, but their stride is {x.stride(-1)}"


@pytest.mark.parametrize(
    ("limits", "x", "reason"),
    [
        (dict(dtypes=[torch.float16]), X, "x is float32, it takes float16; torch, aten, triton can"),
        (dict(when=lambda x: x.shape[-1] <= 4 or "rows of at most 4"), X, "rows of at most 4; torch, aten, triton can"),
        (dict(when=lambda dim: False), X, "its `when` refuses these arguments; torch, aten, triton can"),
        (dict(when=contiguous_rows), X.T, "rows must be contiguous, but their stride is 5; torch, aten, triton can"),
        (dict(backward=None), X.clone().requires_grad_(), r"it has no backward; call it under torch.no_grad\(\)"),
        (dict(), X.to("meta"), "limited runs on a toaster, not on meta; torch, aten can"),
    ],
    ids=["dtype", "shape", "silent", "stride", "gradient", "device"],
)
def test_an_explicit_backend_says_why_it_cannot_run(limits, x, reason):
    refusing(**limits)
    contract.register_backend(
        "limited", lambda device: device.type == "cpu" or f"limited runs on a toaster, not on {device}"
    )
    with backend("limited"), pytest.raises(BackendError, match=f"softmax cannot run on limited: {reason}"):
        ops.softmax(x)


def test_without_a_gpu_triton_names_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    registry.forget_plans()
    reason = "Triton kernels need a CUDA tensor, or TRITON_INTERPRET=1 for CPU tensors, not one on cpu; torch, aten can"
    with backend("triton"), pytest.raises(BackendError, match=f"softmax cannot run on triton: {reason}"):
        ops.softmax(X)


def test_complex_numbers_are_refused_by_name():
    with backend("triton"), pytest.raises(BackendError, match="add cannot run on triton: x is complex64, it takes "):
        ops.add(X.to(torch.complex64), X.to(torch.complex64))


def test_a_backend_without_backward_runs_where_no_gradient_is_wanted():
    refusing(backward=None)
    with backend("limited"):
        ops.softmax(X)
        with torch.no_grad():
            ops.softmax(X.clone().requires_grad_())


def test_auto_falls_back_to_the_definition_in_silence(monkeypatch):
    ops.operators()
    refused = []
    limited = contract.implements(ops.relu, backend="limited", when=lambda x: refused.append(x.shape) or "never")
    limited(lambda x: pytest.fail("auto ran what refused"))
    monkeypatch.setattr(registry, "candidates", lambda described, *_: [described.implementations["limited"]])
    registry.forget_plans()
    assert torch.equal(ops.relu(X), torch.relu(X))
    assert refused == [X.shape]


def test_what_a_backend_needs_may_change_while_running(ran):
    with backend("here"):
        ops.relu(X)
        contract.register_backend("here", lambda device: "it went home")
        with pytest.raises(BackendError, match="it went home"):
            ops.relu(X)


def test_a_variant_of_a_backend_needs_what_the_backend_does():
    reason = backends.usable("triton", torch.device("meta"))
    assert "need a CUDA tensor" in str(reason)
    assert backends.usable("triton_naive", torch.device("meta")) == reason
    assert backends.usable("mine_naive", torch.device("meta")) is True

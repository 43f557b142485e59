"""What each process does in the tests of a shared engine: one tiny model, in float64 so that the order of sums decides nothing."""

from dataclasses import replace

import pytest
import tiny_models as tiny
import torch

from tilestack.engine import Engine, EngineSettings, Request, SamplingParams
from tilestack.engine.params import Structure
from tilestack.engine.settings import bytes_of_token
from tilestack.parallel import serving
from tilestack.parallel.mesh import Layout, Mesh
from tilestack.parallel.tensor import cuts, split_decoder

PROMPTS = [[3, 5, 7, 11, 13, 17, 19, 23, 29], [3, 5, 7, 11, 13, 17, 19, 23, 31, 37], [4], list(range(20, 44))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(seed=7, max_tokens=12, n=2, top_k=20, repetition_penalty=1.2),
    SamplingParams(seed=8, max_tokens=7, logit_bias={5: 3.5, 9: -2.0}, logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.9, seed=-3, max_tokens=10, stop_ids=(11,), ignore_eos=True),
]


def requests(count):
    return [Request(f"r{n}", PROMPTS[n % 4], PARAMS[n // 2 % 4], priority=n % 3) for n in range(count)]


def settings_for(decoder, pages, **changed):
    made = EngineSettings(page=4, max_sequences=6, step_tokens=16, queue=None, **changed)
    return replace(made, kv_memory=pages * 4 * bytes_of_token(torch.float64, decoder))


def answers(engine, count, cancelled=()):
    """What each request is answered with, as rows of a tensor; some are cancelled when they have their third token."""
    for request in requests(count):
        engine.add(request)
    found = {request.id: [[] for _ in range(request.params.drawn)] for request in requests(count)}
    while engine.busy:
        for request, delta in engine.step():
            assert delta.error is None, delta.error
            found[request.id][delta.choice] += delta.ids
            if request.id in cancelled and len(found[request.id][0]) >= 3:
                engine.cancel(request.id)
    rows = [torch.tensor(choice[:3] if id in cancelled else choice) for id, all in found.items() for choice in all]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def by_one(family, count, cancelled, pages, **changed):
    decoder = tiny.ours(family).double()
    engine = Engine(decoder, None, settings_for(decoder, pages, **changed))
    return answers(engine, count, cancelled), engine.stats()


def shared(group, family, pages, **changed):
    """A rank's engine over its share, taken module by module as a checkpoint is loaded."""
    mesh = Mesh(Layout(tensor=torch.distributed.get_world_size(group)))
    decoder = tiny.ours(family).double()
    shares = cuts(decoder.config)
    for path, module in decoder.named_modules():
        serving.take_share(shares, mesh.index("tensor"), mesh.size("tensor"), path, module)
    split_decoder(decoder, mesh.group("tensor"))
    return serving.shared_engine(decoder, None, settings_for(decoder, pages, **changed), mesh)


def serves(group, family, count, cancelled, pages, changed):
    engine = shared(group, family, pages, **changed)
    found = {}
    if isinstance(engine, serving.LeadingEngine):
        found["answers"] = answers(engine, count, cancelled)
        engine.close()
    else:
        serving.follow(engine, serving.Orders())
    stats = engine.stats()
    return found | {
        "seen": torch.tensor(engine.seen),
        "stats": torch.tensor([stats.preemptions, stats.steps, stats.cached_tokens, stats.accepted, stats.pages_used]),
    }


def draws_freely(group):
    """Requests without a seed, for each of which the first process draws one."""
    engine = shared(group, "qwen3", 64)
    if not isinstance(engine, serving.LeadingEngine):
        serving.follow(engine, serving.Orders())
        return {"seen": torch.tensor(engine.seen)}
    for number in range(3):
        engine.add(Request(f"{number}", [4, 5], SamplingParams(max_tokens=20, ignore_eos=True)))
    while engine.busy:
        engine.step()
    engine.close()
    return {"seen": torch.tensor(engine.seen)}


def loses_a_step(group, rank):
    """A step fails on one rank alone, in the middle of the model. What became of the requests, or of who follows."""
    engine = shared(group, "qwen3", 64)
    if torch.distributed.get_rank() == rank:
        made, done = engine.decoder.layers[1].forward, []

        def fails(*arguments):
            done.append(1)
            if len(done) > 3:
                raise RuntimeError("out of memory")
            return made(*arguments)

        engine.decoder.layers[1].forward = fails
    try:
        if not isinstance(engine, serving.LeadingEngine):
            serving.follow(engine, serving.Orders())
            return {}
        lost = []
        for request in requests(6):
            engine.add(request)
        errors = []
        while engine.busy:
            errors += [delta.error for _, delta in engine.step() if delta.error]
        lost += [1] * (engine.lost is not None)
        try:
            engine.accept(requests(1)[0])
        except serving.ProcessLost:
            lost.append(2)
        engine.fail_all(RuntimeError("the connection is closed"))  # as whatever comes after finds it
        return {"lost": torch.tensor(lost), "errors": torch.tensor(len(errors)), "left": torch.tensor(engine.pool.used)}
    except RuntimeError as problem:  # of one who follows
        return {"problem": torch.tensor(list(str(problem).encode()))}


def finds_nobody(group):
    """The others are gone before the first process can tell them of a step. How many answers end with an error."""
    engine = shared(group, "qwen3", 64)
    if not isinstance(engine, serving.LeadingEngine):
        serving.Orders()
        return {}
    for request in requests(6):
        engine.add(request)
    news = engine.fail_all(RuntimeError("the connection is closed"))  # as a thread does whose step raised this
    return {"errors": torch.tensor(sum(delta.finish == "error" for _, delta in news))}


def is_interrupted(group):
    """Ctrl-C in a step of the first process, by whom the engine is asked again."""
    engine = shared(group, "qwen3", 64)
    if not isinstance(engine, serving.LeadingEngine):
        serving.Orders()
        return {}

    def interrupts(*arguments):
        raise KeyboardInterrupt

    engine.runner.launch, engine.tell = interrupts, lambda *orders: None
    engine.add(requests(1)[0])
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(serving.ProcessLost):
        engine.accept(requests(1)[0])
    return {}


def goes_another_way(group, how):
    """The first process reads another token, or ends an answer by itself."""
    engine = shared(group, "qwen3", 64)
    if isinstance(engine, serving.LeadingEngine):
        engine.add(requests(1)[0])
        engine.step()
        if how == "token":
            engine.seen += 1
        else:
            Engine.cancel(engine, "r0")
        engine.tell(["step", *engine.state])
        return {}
    try:
        serving.follow(engine, serving.Orders())
    except serving.ProcessLost as problem:
        return {"problem": torch.tensor(list(str(problem).encode()))}
    return {}


def every_word():
    """A request that says all there is to say."""
    params = SamplingParams(
        temperature=0.3, top_k=3, top_p=0.1, min_p=0.2, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=-0.1,
        logit_bias={7: 0.1}, seed=2**63, n=2, best_of=3, max_tokens=5, min_tokens=1, stop=("é\n", '"'), stop_ids=(1, 2),
        ignore_eos=True, keep_stop=True, logprobs=0, prompt_logprobs=1, structure=Structure("regex", "[ab]+"),
    )  # fmt: skip
    return Request("a/ü", [1, 2, 96], params, -2, None, "tenant", None)


def says_much(group):
    """Orders of all lengths around what one message brings."""
    orders = serving.Orders()
    lengths = [0, 1, *range(serving.AT_ONCE - 40, serving.AT_ONCE + 20), 3 * serving.AT_ONCE + 1]
    if torch.distributed.get_rank() == 0:
        for length in lengths:
            orders.tell([["cancel", "é" * (length % 2) + "x" * length]])
        return {}
    heard = [orders.hear() for _ in lengths]
    return {
        "right": torch.tensor([h == [["cancel", "é" * (n % 2) + "x" * n]] for h, n in zip(heard, lengths, strict=True)])
    }

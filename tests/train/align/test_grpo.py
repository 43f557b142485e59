"""GRPO: the ratio is 1 where it must be, the gradient is REINFORCE's, the reference is held, and rollouts resume."""

import copy
import json
from contextlib import nullcontext

import pytest
import torch
from small import CONFIG, CPU, decoder, recipe, through_json, tokenizer

from tilestack import models
from tilestack.data import NO_LABEL, corpora
from tilestack.engine import SamplingParams
from tilestack.nn.lora import add_lora
from tilestack.parallel.placement import Placement
from tilestack.train import RecipeError
from tilestack.train.align.grpo import GRPO, GRPORecipe, GRPOSettings, refuse_other_rotation
from tilestack.train.evaluation.answers import answer_all, requests_of
from tilestack.train.evaluation.log_probs import Scored, in_rows, log_probs
from tilestack.train.loop import Trainer


def grpo(model, **sections):
    settings = {"max_new_tokens": 5, "group": 4} | sections.pop("grpo", {})
    objective = GRPO(recipe(GRPORecipe, grpo=settings, **sections), Placement(model), tokenizer(), CPU)
    objective.reward = even  # the answers of random weights are never right
    return objective


def even(task, text):
    return float(len(text) % 2 == 0)


def means(loss):
    return {name: float(value / loss.weights[name].clamp(min=1)) for name, value in loss.metrics.items()}


def moved(model, by=0.05):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=by)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_on_new_answers_the_ratio_is_one_to_the_bit(dropout):
    model = decoder()
    add_lora(model, ["layers.*"], rank=2, dropout=dropout)
    moved(model)
    model.train()
    objective = grpo(model)
    loss = objective.loss(model, objective.next_batch())
    assert torch.equal(loss.metrics["ratio"], loss.count.float())
    assert float(loss.metrics["clipped"]) == 0


def test_in_the_batch_invariant_mode_the_sampler_says_what_the_loss_finds():
    model = decoder()
    moved(model)
    objective = grpo(model, grpo={"batch_invariant": True})
    batch = objective.next_batch()
    assert torch.equal(batch.old, objective.log_probs(model, batch.rows).detach())
    assert (batch.old[batch.rows.labels != NO_LABEL] < 0).all()
    loss = objective.loss(model, batch)
    assert torch.equal(loss.metrics["ratio"], loss.count.float())
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_batch_invariant_mode_samples_at_temperature_one():
    with pytest.raises(RecipeError, match=r"grpo.batch_invariant needs grpo.temperature = 1, not 0.7"):
        grpo(decoder(), grpo={"batch_invariant": True, "temperature": 0.7})


def longrope_decoder(trained):
    """One that reads texts of more than so many tokens by frequencies far from the others."""
    torch.manual_seed(0)
    scaling = dict(
        rope_type="longrope", short_factor=[1.0] * 4, long_factor=[1.0, 3.0, 9.0, 27.0], attention_factor=1.0
    )
    kind = dict(model_type="phi3", rope_scaling=scaling, original_max_position_embeddings=trained, pad_token_id=0)
    given = {**CONFIG, **kind, "vocab_size": tokenizer().vocabulary}
    model = models.Decoder(models.ModelConfig.from_hf(given))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model.eval()


PROMPTS, ANSWER = ([7, 8, 9, 10], list(range(20, 32))), 4
CONTEXT = 12 + ANSWER + 1  # which an engine has for them


@torch.no_grad()
@pytest.mark.parametrize(
    ("trained", "agree"), [(CONTEXT, True), (CONTEXT - 1, False), (4 + ANSWER - 1, False), (3, True)]
)
def test_sampler_and_loss_rotate_alike_where_all_texts_are_short_or_all_are_long(trained, agree):
    """And where they do not, it is refused: the log-probabilities that the sampler tells are not those of the loss."""
    model = longrope_decoder(trained)
    params = SamplingParams(temperature=1.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0)
    drawn = [each.completions[0] for each in answer_all(model, requests_of(PROMPTS, params, seed=1))]
    rows = in_rows([Scored.answer(prompt, each.ids) for prompt, each in zip(PROMPTS, drawn, strict=True)])
    found = log_probs(model, rows)[rows.labels != NO_LABEL]
    told = torch.tensor([token.logprob for each in drawn for token in each.logprobs])
    assert torch.allclose(found, told, rtol=1e-4, atol=1e-4) == agree
    settings = GRPOSettings(max_new_tokens=ANSWER)
    with nullcontext() if agree else pytest.raises(RecipeError, match=f"texts of more than {trained} tokens"):
        refuse_other_rotation(model, list(map(len, PROMPTS)), settings)


def test_a_model_that_would_draw_and_learn_by_two_rotations_is_refused_with_what_to_set():
    longest = max(len(grpo(decoder()).prompt(task)) for task in grpo(decoder()).tasks)
    model = longrope_decoder(longest + 5)  # 5 tokens of an answer, and one
    with pytest.raises(
        RecipeError, match=rf"in a context of {longest + 6} tokens .* data\.sequence to {longest + 4} or"
    ):
        grpo(model)
    assert grpo(model, data={"sequence": longest + 4}).counts["too long for data.sequence"]
    assert grpo(model, grpo={"max_new_tokens": 4}).next_batch()


def test_an_answer_may_end_at_once():
    """And be learned in a text no longer than its prompt."""
    settings = GRPOSettings(max_new_tokens=ANSWER)
    with pytest.raises(RecipeError, match="texts of more than 4 tokens"):
        refuse_other_rotation(longrope_decoder(4), [4, 12], settings)
    refuse_other_rotation(longrope_decoder(4), [5, 12], settings)


def test_answers_are_the_policys_and_advantages_their_groups():
    model = decoder()
    objective = grpo(model)
    batch = objective.next_batch()
    assert batch.rewards.shape == (3, 4)
    labels = [row[row != NO_LABEL].tolist() for row in batch.rows.labels]
    assert [even(None, tokenizer().decode(row)) for row in labels] == batch.rewards.flatten().tolist()
    assert len({tuple(row) for row in labels[:4]}) > 1  # one prompt, answers that differ
    prompts = [ids[: (row != NO_LABEL).nonzero()[0, 0] + 1].tolist() for ids, row in zip(batch.rows.ids, batch.rows.labels, strict=True)]  # fmt: skip
    assert prompts[0] == prompts[3] != prompts[4]
    torch.testing.assert_close(batch.advantages.view(3, 4).sum(-1), torch.zeros(3), atol=1e-5, rtol=0)


def test_every_answer_is_rewarded_for_the_task_it_answers():
    objective = grpo(decoder())
    asked = []

    def reward(task, text):
        asked.append((task.prompt, text))
        return float(len(asked))

    objective.reward = reward
    batch = objective.next_batch()
    assert batch.rewards.flatten().tolist() == [float(number) for number in range(1, 13)]  # three tasks, four answers
    for (prompt, text), ids, labels in zip(asked, batch.rows.ids, batch.rows.labels, strict=True):
        assert text == tokenizer().decode(labels[labels != NO_LABEL].tolist())
        assert prompt in tokenizer().decode(ids[: (labels != NO_LABEL).nonzero()[0, 0] + 1].tolist())
    assert len({prompt for prompt, _ in asked}) == 3


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_figures_of_a_step_are_means_over_all_of_its_answers_or_tokens(average, tmp_path):
    """However many tokens are learned from in each of its micro-batches."""
    model, taken = decoder(), []
    objective = grpo(model, grpo={"average": average}, data={"accumulate": 3}, run={"steps": 1})
    next_batch = objective.next_batch
    objective.next_batch = lambda: taken.append(next_batch()) or taken[-1]
    figures = Trainer(objective.recipe, model, objective, tmp_path).run()
    rewards = torch.cat([batch.rewards.flatten() for batch in taken])
    lengths = [batch.rows.tokens for batch in taken]
    old = torch.cat([batch.old[batch.rows.labels != NO_LABEL] for batch in taken])
    assert len({int(each.sum()) for each in lengths}) > 1
    assert figures["reward"] == pytest.approx(float(rewards.mean()))
    assert figures["reward_std"] == pytest.approx(float(rewards.std()))
    assert figures["answer_tokens"] == pytest.approx(float(torch.cat(lengths).float().mean()))
    assert figures["cut_short"] == pytest.approx(float((~torch.cat([batch.ended for batch in taken])).float().mean()))
    assert figures["entropy"] == pytest.approx(-float(old.mean()), rel=1e-5)


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_the_gradient_on_new_answers_is_that_of_reinforce(average):
    model = decoder()
    objective = grpo(model, grpo={"beta": 0.0, "average": average, "temperature": 0.7})
    batch = objective.next_batch()
    loss = objective.loss(model, batch)
    (loss.total / loss.count).backward()
    twin = decoder()
    weighted, tokens = 0.0, 0
    for ids, labels, advantage in zip(batch.rows.ids, batch.rows.labels, batch.advantages, strict=True):
        scored = labels != NO_LABEL
        scores = (twin(ids[None])[0] / 0.7).log_softmax(-1)[scored]
        own = scores.gather(-1, labels[scored][:, None]).sum() * advantage
        weighted = weighted + (own if average == "token" else own / scored.sum())
        tokens += int(scored.sum())
    (-weighted / (tokens if average == "token" else len(batch.advantages))).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("average", "of_answers", "weighted"),
    [
        ("token", False, False),
        ("token", False, True),
        ("sequence", False, False),
        ("sequence", True, True),
        ("constant", False, False),
    ],
)
def test_the_loss_is_that_of_answers_read_one_by_one(average, of_answers, weighted):
    """Of answers that are used again, away from the reference and from the policy that gave them."""
    reference, model = decoder(), decoder()
    low, high = (0.005, 0.01) if of_answers else (0.1, 0.4)
    own = {"beta": 0.5, "clip_low": low, "clip_high": high, "reuse": 2, "average": average, "temperature": 0.7}
    own |= {"ratio": "sequence" if of_answers else "token", "weighted_kl": weighted}
    objective = grpo(model, grpo=own)
    objective.reward = lambda task, text: float(len(text) % 3)
    moved(model, by=0.02)
    old, batch = copy.deepcopy(model), objective.next_batch()
    objective.loss(model, batch)
    moved(model, by=-0.01)
    loss = objective.loss(model, batch)
    twin = copy.deepcopy(model)
    rewards, total = batch.rewards.double(), 0.0
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    figures = {name: [] for name in ("ratio", "clipped", "entropy", "kl")}
    for ids, labels, advantage in zip(batch.rows.ids, batch.rows.labels, advantages.flatten(), strict=True):
        terms, places = [], (labels != NO_LABEL).nonzero()[:, 0].tolist()
        said = lambda each, place: (each(ids[None, : place + 1])[0, -1] / 0.7).log_softmax(-1)[labels[place]]
        moves = [said(twin, place) - said(old, place) for place in places]
        for place, move in zip(places, moves, strict=True):
            now, found = said(twin, place), said(reference, place)
            ratio = (sum(moves) / len(moves) if of_answers else move).exp()
            kl = ((found - now).exp() - (found - now) - 1) * (move.exp() if weighted else 1)
            clipped = ratio.clamp(1 - low, 1 + high)
            terms.append(-torch.minimum(ratio * advantage, clipped * advantage) + 0.5 * kl)
            told = (ratio, clipped * advantage < ratio * advantage, -now, kl)
            for name, value in zip(figures, told, strict=True):
                figures[name].append(float(value.detach()))
        total = total + sum(terms) / {"token": 1, "sequence": len(terms), "constant": 5}[average]
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-4)
    assert int(loss.count) == (len(figures["kl"]) if average == "token" else 12)
    found = means(loss)
    for name, values in figures.items():
        assert found[name] == pytest.approx(sum(values) / len(values), rel=1e-3), name
    assert 0 < found["clipped"] < 1
    assert found["reward_std"] == pytest.approx(float(batch.rewards.std()))
    loss.total.backward()
    total.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ratio": "sequence"}, 'grpo.ratio = "sequence" needs grpo.average = "sequence", not "token"'),
        ({"weighted_kl": True, "beta": 0.0}, "grpo.weighted_kl has no meaning where grpo.beta is 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given, message):
    with pytest.raises(RecipeError, match=message):
        grpo(decoder(), grpo=given)


def test_answers_are_drawn_at_the_temperature_of_the_recipe():
    cold, warm = (grpo(decoder(), grpo={"temperature": temperature}).next_batch() for temperature in (1e-4, 1.0))
    for of_one in cold.rows.ids.view(3, 4, -1):
        assert (of_one == of_one[0]).all()
    assert not (warm.rows.ids[:4] == warm.rows.ids[0]).all()


def test_the_reference_stays_as_the_run_found_it():
    model = decoder()
    objective = grpo(model, grpo={"beta": 0.5})
    assert means(objective.loss(model, objective.next_batch()))["kl"] == pytest.approx(0, abs=1e-9)
    moved(model)
    batch = objective.next_batch()
    figures = means(objective.loss(model, batch))
    assert figures["kl"] > 1e-4
    policy = {name: value.clone() for name, value in model.state_dict().items()}
    original = objective.reference_log_probs(batch.rows)
    assert all(torch.equal(value, policy[name]) for name, value in model.state_dict().items())
    assert torch.equal(grpo(decoder(), grpo={"beta": 0.5}).reference_log_probs(batch.rows), original)
    assert grpo(model, grpo={"beta": 0.0}).reference_log_probs(batch.rows) is None


def test_the_reference_computes_in_the_precision_of_the_policy():
    model = decoder()
    objective = grpo(model, precision={"compute": "bfloat16"})
    batch = objective.next_batch()
    assert means(objective.loss(model, batch))["kl"] > 1e-6  # in float32
    with objective.autocast():
        assert means(objective.loss(model, batch))["kl"] == 0


def test_with_adapters_the_reference_is_the_model_without_them():
    plain, model = decoder(), decoder()
    add_lora(model, ["layers.*"], rank=2)
    objective = grpo(model)
    moved(model)
    batch = objective.next_batch()
    assert objective.found_weights is None
    assert torch.equal(batch.reference, grpo(plain).reference_log_probs(batch.rows))
    assert means(objective.loss(model, batch))["kl"] > 1e-6


def test_answers_are_used_again_against_the_policy_that_gave_them():
    model = decoder()
    objective = grpo(model, grpo={"reuse": 2})
    first = objective.next_batch()
    objective.loss(model, first)
    moved(model)
    again = objective.next_batch()
    assert again is first
    figures = means(objective.loss(model, again))
    assert figures["ratio"] != 1
    assert figures["clipped"] > 0
    assert objective.next_batch() is not first


def test_answers_are_used_again_in_another_step_and_not_in_the_same():
    objective = grpo(decoder(), grpo={"reuse": 2}, data={"accumulate": 2})
    first, second, third, fourth = (objective.next_batch() for _ in range(4))
    assert first is not second
    assert third is first
    assert fourth is second


@pytest.mark.parametrize("training", [True, False])
def test_each_rollout_draws_anew_and_leaves_the_policy_as_it_was(training):
    objective = grpo(decoder().train(training), data={"batch": 1})
    task = objective.tasks[0]
    objective.tasks = [task] * len(objective.tasks)  # so that answers differ by what is drawn alone
    found = [objective.rollout().rows.ids.tolist() for _ in range(3)]
    assert found[0] != found[1] != found[2]
    assert objective.policy.training is training
    other = grpo(decoder(), data={"batch": 1}, run={"seed": 1})
    other.tasks = objective.tasks
    assert other.rollout().rows.ids.tolist() != found[0]


def test_figures_say_how_the_groups_did():
    model = decoder()
    objective = grpo(model)
    objective.reward = lambda task, text: 1.0
    batch = objective.next_batch()
    figures = means(objective.loss(model, batch))
    assert figures["reward"] == pytest.approx(1)
    assert (figures["reward_std"], figures["groups_alike"]) == (0, pytest.approx(1))
    assert figures["answer_tokens"] == pytest.approx(float(batch.rows.tokens.float().mean()))
    assert figures["cut_short"] == pytest.approx(1 - float(batch.ended.float().mean()))
    assert torch.equal(batch.advantages, torch.zeros(12))


@pytest.mark.parametrize("reuse", [1, 3])
def test_a_saved_place_continues_with_the_same_answers_to_the_bit(reuse):
    model = decoder()
    objective = grpo(model, grpo={"reuse": reuse}, data={"accumulate": 2})
    twin = grpo(copy.deepcopy(model), grpo={"reuse": reuse}, data={"accumulate": 2})
    for _ in range(4):
        objective.loss(model, objective.next_batch())
    moved(model)  # so that it matters which policy gave the answers that are used again
    twin.policy.load_state_dict(model.state_dict())
    twin.load_state_dict(through_json(objective.state_dict()))
    assert len(twin.pending) == 2 * (reuse - 2 if reuse > 1 else 0)
    for _ in range(3):
        ours, theirs = objective.next_batch(), twin.next_batch()
        assert torch.equal(ours.rows.ids, theirs.rows.ids)
        assert torch.equal(ours.advantages, theirs.advantages)
        assert ours.reward_figures == theirs.reward_figures
        assert torch.equal(objective.loss(model, ours).total, twin.loss(twin.policy, theirs).total)


def test_rewards_are_checked_by_a_program():
    model = decoder()
    objective = GRPO(
        recipe(GRPORecipe, grpo={"reward": "exact", "max_new_tokens": 2}), Placement(model), tokenizer(), CPU
    )
    task = corpora.Task("2 + 2?", "4", "sum")
    assert [objective.reward(task, text) for text in (" 4\n", "It is 4", "5")] == [1, 0, 0]
    assert objective.evaluate(model)["validation_reward"] == 0
    number = GRPO(recipe(GRPORecipe), Placement(model), tokenizer(), CPU)
    assert [number.reward(task, text) for text in (" 4\n", "2 + 2 = 4.", "5")] == [1, 1, 0]


def test_an_evaluation_rewards_the_likeliest_answers():
    model, said = decoder(), []
    objective = grpo(model)
    objective.reward = lambda task, text: said.append(text) or 0.0
    objective.evaluate(model)
    likeliest = []
    for task in objective.held:
        ids = prompt = objective.prompt(task)
        while len(ids) < len(prompt) + 5 and (ids == prompt or ids[-1] not in tokenizer().stops):
            ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
        likeliest.append(tokenizer().decode(ids[len(prompt) :]))
    assert said == likeliest


def test_rewards_belong_to_the_tasks_that_were_answered():
    """A reward that names its task: were rewards dealt to other rows than they were earned in, advantages would differ."""
    model = decoder()
    objective = grpo(model, grpo={"divide_by_std": False}, data={"batch": 6})
    marks = {task.prompt: number for number, task in enumerate(objective.tasks)}
    earned = lambda prompt, text: marks[prompt] + len(text) / 100
    objective.reward = lambda task, text: earned(task.prompt, text)
    batch = objective.next_batch()
    expected = []
    for ids, labels in zip(batch.rows.ids, batch.rows.labels, strict=True):
        first = int((labels != NO_LABEL).nonzero()[0, 0]) + 1
        prompt = (
            tokenizer().decode(ids[:first].tolist(), special=True).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        )
        expected.append(earned(prompt, tokenizer().decode(labels[labels != NO_LABEL].tolist())))
    expected = torch.tensor(expected).view(6, 4)
    torch.testing.assert_close(batch.rewards, expected)
    torch.testing.assert_close(batch.advantages.view(6, 4), expected - expected.mean(-1, keepdim=True))
    assert len({round(row[0]) for row in expected.tolist()}) == 6  # the tasks do differ, so a permutation would be seen


def test_rewards_come_from_a_file(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text("def score(task, text):\n    return task.row['bonus'] + len(text) % 2\n")
    rows = tmp_path / "tasks.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n} + 1?", "bonus": {n}}}\n' for n in range(1, 6)))
    files = {"corpus": "files", "files": [str(rows)], "validation": 0.0, "examples": 0}
    settings = {"reward": f"{path}:score", "max_new_tokens": 3, "group": 2}
    objective = GRPO(recipe(GRPORecipe, grpo=settings, data=files), Placement(decoder()), tokenizer(), CPU)
    batch = objective.next_batch()
    assert all(1 <= reward <= 6 for reward in batch.rewards.flatten().tolist())
    assert batch.rewards.mean() > 1


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("def score(task, text): return 'much'", "score", "must return a finite number, not 'much'"),
        ("def score(task, text): return float('nan')", "score", "must return a finite number, not nan"),
        ("def score(task, text): return None", "score", "must return a finite number, not None"),
        ("def score(task, text): return text[99]", "score", "failed on .*IndexError"),
        ("def score(task, text): return 1", "scored", "has no function scored"),
        ("score = (", "score", "cannot be run: SyntaxError"),
        ("raise SystemExit(0)", "score", "cannot be run: SystemExit: 0"),
        ("def score(task, text): raise SystemExit(0)", "score", "failed on .*SystemExit"),
    ],
)
def test_a_reward_that_cannot_be_used_is_named(tmp_path, code, name, message):
    (tmp_path / "r.py").write_text(code)
    settings = {"reward": f"{tmp_path}/r.py:{name}", "max_new_tokens": 2, "group": 2}
    with pytest.raises(RecipeError, match=message):
        GRPO(recipe(GRPORecipe, grpo=settings), Placement(decoder()), tokenizer(), CPU).next_batch()


def test_system_prompts_and_messages_are_part_of_a_task(tmp_path):
    rows = tmp_path / "tasks.jsonl"
    earlier = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2 + 2?"},
    ]
    written = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": earlier, "answer": "4", "system": "Think."}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in written))
    data = {"corpus": "files", "files": [str(rows)], "validation": 0.0, "examples": 0, "system": "Be brief."}
    objective = grpo(decoder(), data=data)
    first, second = (tokenizer().decode(objective.prompt(task), special=True) for task in objective.tasks)
    assert first.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?")
    assert second.startswith("<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\nHi")
    assert second.endswith("2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert objective.tasks[1].prompt == "2 + 2?"


def test_tools_of_a_task_are_told_to_the_model(tmp_path):
    rows, tools = tmp_path / "tasks.jsonl", [{"type": "function", "function": {"name": "add"}}]
    rows.write_text(json.dumps({"prompt": "1 + 1?", "answer": "2", "tools": tools}) + "\n")
    data = {"corpus": "files", "files": [str(rows)], "validation": 0.0, "examples": 0, "sequence": 256}
    objective = grpo(decoder(), data=data)
    told = tokenizer().decode(objective.prompt(objective.tasks[0]), special=True)
    assert told == tokenizer().chat([{"role": "user", "content": "1 + 1?"}], tools=tools, add_generation_prompt=True)
    assert '"name": "add"' in told


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_answers_that_were_cut_short_can_be_left_alone(average):
    model = decoder()
    objective = grpo(model, grpo={"mask_truncated": True, "average": average})
    batch = objective.next_batch()
    moved(model)  # away from the reference
    batch.ended = torch.tensor([True, False] * 6)
    plain = grpo(model, grpo={"average": average})
    kept = copy.copy(batch)
    even_rows = torch.arange(12) % 2 == 0
    kept.rows = type(batch.rows)(batch.rows.ids[even_rows], batch.rows.labels[even_rows])
    kept.advantages, kept.reference, kept.old = batch.advantages[even_rows], batch.reference[even_rows], None
    kept.ended = batch.ended[even_rows]
    ours, theirs = objective.loss(model, batch), plain.loss(model, kept)
    torch.testing.assert_close(ours.total, theirs.total)
    assert int(ours.count) == int(theirs.count)
    assert means(ours)["cut_short"] == pytest.approx(0.5)
    batch.ended = torch.zeros(12, dtype=torch.bool)
    nothing = objective.loss(model, batch)
    assert (nothing.total.item(), int(nothing.count)) == (0, 0)
    assert means(nothing)["reward"] == pytest.approx(float(batch.rewards.mean()))


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_a_micro_batch_that_was_all_cut_short_changes_nothing_of_the_others(tmp_path, average):
    """Were it to count as one answer, the others would weigh less."""
    figures = []
    for number, left_alone in enumerate(([], [True], [True, True])):
        model, accumulate = decoder(), 1 + len(left_alone)
        objective = grpo(model, grpo={"mask_truncated": True, "average": average}, data={"accumulate": accumulate})
        found = objective.next_batch()
        batches = [copy.copy(found) for _ in range(accumulate)]
        for batch, alone in zip(batches, [False, *left_alone], strict=True):
            batch.ended = torch.full_like(batch.ended, not alone)
        objective.note_figures(batches)
        objective.next_batch = iter(batches).__next__
        moved(model)
        trainer = Trainer(objective.recipe, model, objective, tmp_path / str(number))
        trainer.train_step()
        figures.append({name: float(trainer.pending[0].figure(name)) for name in ("loss", "grad_norm", "reward")})
    assert figures[0]["grad_norm"] > 0
    assert figures[1] == pytest.approx(figures[0], rel=1e-6)
    assert figures[2] == pytest.approx(figures[0], rel=1e-6)


def test_tasks_that_leave_no_room_for_an_answer_are_left_out():
    everything, some = grpo(decoder()), grpo(decoder(), data={"sequence": 34})
    assert 0 < len(some.tasks) < len(everything.tasks)
    assert some.next_batch().rows.ids.shape[1] <= 48
    room = min(len(everything.prompt(task)) for task in everything.tasks)
    fitting = grpo(decoder(), data={"sequence": room + 5}).tasks
    assert {len(everything.prompt(task)) for task in fitting} == {room}  # those that fit to the token
    with pytest.raises(RecipeError, match=r"none of .* tasks fits into data.sequence = 8 with an answer of"):
        grpo(decoder(), data={"sequence": 8})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"reward": "best"},
            "grpo.reward must be number, exact, or a function of a file as in rewards.py:score, not 'best'",
        ),
        ({"group": 1}, "grpo.group must be at least 2, not 1"),
        ({"temperature": 0.0}, "grpo.temperature must be above 0, not 0.0"),
        ({"average": "answer"}, "grpo.average must be one of token, sequence, constant, not 'answer'"),
        ({"betta": 0.1}, r"no setting grpo.betta; did you mean grpo.beta\?"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, message):
    with pytest.raises(RecipeError, match=message):
        recipe(GRPORecipe, grpo=settings)

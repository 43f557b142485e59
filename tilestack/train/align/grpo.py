"""Group-relative policy optimisation: the model answers, a program checks, and what did better than its group is raised.

A step in four parts. The model draws a group of answers to each prompt; a verifier gives each a reward; an answer's
advantage is its reward against the others of its group, so no value model is needed; and the loss raises the tokens of
answers with an advantage and lowers the others, held near a frozen reference.

The sampler decodes token by token with a cache, the loss reads whole sequences, and the two round differently. So the
log-probabilities the ratio is taken to are not the sampler's: they are those of the loss's own first pass over the
answers, with the weights that drew them. The ratio is then exactly 1 at the first step on new answers, and where it
differs later, the policy has moved and not the arithmetic. With `batch_invariant` both sides run in the batch-invariant mode
(models/invariant.py), and the sampler's own log-probabilities are those of the loss, bit for bit.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilestack.data import NO_LABEL, Tokenizer, corpora, formats
from tilestack.nn.lora import lora_layers, without_lora
from tilestack.train import execution
from tilestack.train.align import examples, rewards
from tilestack.train.align.deck import Deck, digest_of
from tilestack.train.align.losses import group_advantages, k3, policy_losses
from tilestack.train.evaluation.answers import answers, answers_and_log_probs, prompt_ids, shown_answers
from tilestack.train.evaluation.log_probs import Rows, Scored, in_rows, invariant_log_probs, log_probs
from tilestack.train.objective import Loss
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError, setting


@dataclass(frozen=True)
class TaskData(examples.ArithmeticData):
    """Tasks with answers that can be checked: arithmetic, or rows of files in the format of `data.formats`."""

    corpus: str = setting("arithmetic", "what to learn from", choices=("arithmetic", "files"))
    batch: int = setting(8, "prompts in a micro-batch, each answered by a group", low=1)
    system: str = setting("", "a system prompt before every task that has none of its own")


@dataclass(frozen=True)
class GRPOSettings:
    group: int = setting(8, "answers to each prompt", low=2)
    max_new_tokens: int = setting(64, "the longest answer", low=1)
    temperature: float = setting(1.0, "of the answers, and of the loss", above=0)
    reward: str = setting("number", "number: the last number is the answer; exact: the whole text is; rewards.py:score: a function of yours")  # fmt: skip
    beta: float = setting(0.04, "weight of the divergence from the reference; 0 needs no reference", low=0)
    divide_by_std: bool = setting(True, "divide advantages by the standard deviation of their group")
    average: str = setting("token", "tokens count alike, or answers do", choices=("token", "sequence"))
    clip_low: float = setting(0.2, "how far below 1 the ratio may fall", above=0, high=1)
    clip_high: float = setting(0.2, "how far above 1 the ratio may rise", above=0)
    reuse: int = setting(1, "steps taken on the same answers; more than 1 is off-policy after the first", low=1)
    mask_truncated: bool = setting(False, "learn nothing from answers that max_new_tokens cut short")
    batch_invariant: bool = setting(False, "answer and learn in the batch-invariant mode: what the sampler says of its tokens is what the loss finds, to the bit; slower")  # fmt: skip

    def __post_init__(self) -> None:
        rewards.check_name(self.reward)
        if self.batch_invariant and self.temperature != 1:
            raise RecipeError(
                f"grpo.batch_invariant needs grpo.temperature = 1, not {self.temperature}: the sampler tells the model's own log-probabilities"
            )


@dataclass(frozen=True)
class GRPORecipe(Recipe):
    data: TaskData = field(default_factory=TaskData)
    grpo: GRPOSettings = field(default_factory=GRPOSettings)


@dataclass
class Rollout:
    """Answers to some prompts, the answers of a group next to each other."""

    rows: Rows
    rewards: Tensor  # [prompts, group]
    advantages: Tensor  # [prompts · group]
    ended: Tensor  # [prompts · group], whether an answer ended by itself
    reference: Tensor | None  # [prompts · group, length], log-probabilities under the reference
    old: Tensor | None = (
        None  # the same under the policy that drew them; noted by the first loss, or told by the sampler
    )


class GRPO:
    """Rewards as an objective; see `tilestack.train.objective`."""

    def __init__(self, recipe: GRPORecipe, model: torch.nn.Module, tokenizer: Tokenizer, device: torch.device):
        self.recipe, self.settings, self.tokenizer, self.device = recipe, recipe.grpo, tokenizer, device
        self.policy = model
        self.reward = rewards.find_reward(recipe.grpo.reward)
        found = tasks(recipe)
        self.tasks, sources = self.fitting(found.learned, found.sources)
        self.held, _ = self.fitting(found.held, [0] * len(found.held))
        self.counts = {
            "tasks": len(found.learned), "too long for data.sequence": len(found.learned) - len(self.tasks),
            "held out": len(found.held), "held out and too long": len(found.held) - len(self.held),
        }  # fmt: skip
        if not self.tasks:
            raise RecipeError(
                f"none of {len(found.learned)} tasks fits into data.sequence = {recipe.data.sequence} "
                f"with an answer of grpo.max_new_tokens = {recipe.grpo.max_new_tokens}"
            )
        self.reference: Any = None
        self.has_reference = bool(recipe.grpo.beta)
        if self.has_reference:
            # With adapters, the reference is the model without them; else a copy, made before the first step.
            self.reference = model if lora_layers(model) else copy.deepcopy(model).requires_grad_(False).eval()
        made_of = digest_of(self.tasks, self.held)
        self.deck = Deck(len(self.tasks), recipe.run.seed, sources, found.weights, made_of)
        self.rollouts = 0  # made so far; the next one's seed follows from it
        self.pending: list[Rollout] = []

    def fitting(self, found: Sequence[corpora.Task], sources: Sequence[int]) -> tuple[list[corpora.Task], list[int]]:
        """The tasks that leave room for an answer, and the sources of each."""
        room = self.recipe.data.sequence - self.settings.max_new_tokens
        fitting = [both for both in zip(found, sources, strict=True) if len(self.prompt(both[0])) <= room]
        return [task for task, _ in fitting], [source for _, source in fitting]

    def next_batch(self) -> Rollout:
        if not self.pending:
            made = [self.rollout() for _ in range(self.recipe.data.accumulate)]
            self.pending = made * self.settings.reuse
        return self.pending.pop(0)

    def rollout(self) -> Rollout:
        """New answers of the policy as it is now, with rewards and what the reference thinks of them."""
        chosen = [self.tasks[number] for number in self.deck.deal(self.recipe.data.batch)]
        prompts = [prompt for task in chosen for prompt in [self.prompt(task)] * self.settings.group]
        was_training = self.policy.training
        self.policy.eval()
        asked: dict[str, Any] = dict(
            max_new_tokens=self.settings.max_new_tokens,
            stop=self.tokenizer.stops,
            seed=self.recipe.run.seed * 1_000_003 + self.rollouts,
        )
        told = None
        with self.autocast():
            if self.settings.batch_invariant:
                found, told = answers_and_log_probs(self.policy, prompts, **asked)
            else:
                found = answers(self.policy, prompts, temperature=self.settings.temperature, **asked)
        self.rollouts += 1
        texts = [self.tokenizer.decode(answer) for answer in found]
        answered = [task for task in chosen for _ in range(self.settings.group)]
        rewards = [self.reward(task, text) for task, text in zip(answered, texts, strict=True)]
        sequences = [Scored.answer(prompt, answer) for prompt, answer in zip(prompts, found, strict=True)]
        ended = [answer[-1] in self.tokenizer.stops for answer in found]
        made = self.assembled(in_rows(sequences), torch.tensor(rewards), torch.tensor(ended))
        if told is not None:
            made.old = torch.zeros(made.rows.labels.shape, device=self.device)
            made.old[made.rows.labels != NO_LABEL] = torch.tensor(
                [each for row in told for each in row], device=self.device
            )
        self.policy.train(was_training)
        return made

    def assembled(self, rows: Rows, rewards: Tensor, ended: Tensor) -> Rollout:
        rows, grouped = rows.to(self.device), rewards.view(-1, self.settings.group).to(self.device)
        advantages = group_advantages(grouped, self.settings.divide_by_std).view(-1)
        return Rollout(rows, grouped, advantages, ended.to(self.device), self.reference_log_probs(rows))

    @torch.no_grad()
    def reference_log_probs(self, rows: Rows) -> Tensor | None:
        if self.reference is None:
            return None
        with self.autocast(), without_lora(self.reference):
            return self.log_probs(self.reference, rows)

    def log_probs(self, model: Any, rows: Rows) -> Tensor:
        if self.settings.batch_invariant:
            return invariant_log_probs(model, rows)
        return log_probs(model, rows, self.settings.temperature)

    def loss(self, model: Any, batch: Rollout) -> Loss:
        now = self.log_probs(model, batch.rows)
        if batch.old is None:
            batch.old = now.detach()
        mask = batch.rows.labels != NO_LABEL
        lengths = mask.sum(-1)
        if self.settings.mask_truncated:
            mask = mask & batch.ended[:, None]
        tokens, learned = mask.sum(), mask.any(-1)
        found = policy_losses(now, batch.old, batch.advantages, self.settings.clip_low, self.settings.clip_high)
        losses = found.losses * mask
        per_token = {"ratio": found.ratio, "clipped": found.clipped, "entropy": -now.detach()}
        if batch.reference is not None:
            divergence = k3(now, batch.reference)
            losses = losses + self.settings.beta * divergence * mask
            per_token["kl"] = divergence.detach()
        by_token = self.settings.average == "token"
        total = losses.sum() if by_token else (losses.sum(-1) / lengths.clamp(min=1)).sum()
        count = (tokens if by_token else learned.sum()).clamp(min=1)
        means = {name: (value * mask).sum() / tokens.clamp(min=1) for name, value in per_token.items()} | {
            "reward": batch.rewards.mean(),
            "reward_std": batch.rewards.std(),
            "groups_alike": (batch.rewards.std(-1) == 0).float().mean(),  # nothing can be learned from these
            "answer_tokens": lengths.float().mean(),
            "cut_short": 1 - batch.ended.float().mean(),
        }
        metrics = {name: mean.float() * count for name, mean in means.items()}
        return Loss(total, count, metrics, tokens=batch.rows.ids.numel())

    def evaluate(self, model: Any) -> dict[str, float]:
        """The mean reward of the likeliest answers to tasks held out."""
        held = self.held[: self.recipe.evaluation.batches * self.recipe.data.batch]
        if not held:
            return {}
        found = answers(
            model,
            [self.prompt(task) for task in held],
            max_new_tokens=self.settings.max_new_tokens,
            stop=self.tokenizer.stops,
        )
        rewards = [self.reward(task, self.tokenizer.decode(text)) for task, text in zip(held, found, strict=True)]
        return {"validation_reward": sum(rewards) / len(rewards)}

    def sample(self, model: Any) -> list[str]:
        prompts = [self.prompt(task) for task in self.held[:3]]
        return shown_answers(model, self.tokenizer, prompts, self.recipe.evaluation)

    def prompt(self, task: corpora.Task) -> list[int]:
        messages = list(task.messages) or [formats.user(task.prompt)]
        if self.recipe.data.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.recipe.data.system}, *messages]
        return prompt_ids(self.tokenizer, messages)

    def autocast(self) -> AbstractContextManager[Any]:
        return execution.autocast(self.recipe.precision, self.device)

    def state_dict(self) -> dict[str, Any]:
        """The place among the tasks, how many rollouts there were, and answers that further steps will use."""
        made = list({id(rollout): rollout for rollout in self.pending}.values())
        return {
            "deck": self.deck.state_dict(),
            "rollouts": self.rollouts,
            "made": [saved(rollout) for rollout in made],
            "pending": [next(n for n, each in enumerate(made) if each is rollout) for rollout in self.pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.deck.load_state_dict(state["deck"])
        self.rollouts = state["rollouts"]
        made = [self.restored(each) for each in state["made"]]
        self.pending = [made[number] for number in state["pending"]]

    def restored(self, state: dict[str, Any]) -> Rollout:
        rows = Rows(torch.tensor(state["ids"]), torch.tensor(state["labels"]))
        rollout = self.assembled(rows, torch.tensor(state["rewards"]), torch.tensor(state["ended"]))
        rollout.old = None if state["old"] is None else torch.tensor(state["old"], device=self.device)
        return rollout


def saved(rollout: Rollout) -> dict[str, Any]:
    """A rollout as JSON holds it; a float32 survives that to the bit."""
    tensors = dict(ids=rollout.rows.ids, labels=rollout.rows.labels, rewards=rollout.rewards, ended=rollout.ended)
    return {name: tensor.tolist() for name, tensor in tensors.items()} | {
        "old": None if rollout.old is None else rollout.old.tolist()
    }


def tasks(recipe: GRPORecipe) -> examples.Examples[corpora.Task]:
    """Tasks to learn from and tasks held out; rewards of a file may do without answers."""
    answered = not rewards.is_in_file(recipe.grpo.reward)
    read = lambda row: [formats.task(row, answered)]
    make = lambda count: examples.arithmetic(recipe.data, recipe.run.seed, count)
    return examples.gathered(recipe.data, recipe.run.seed, read, make, lambda task: (task.prompt, task.messages))


def texts(recipe: GRPORecipe) -> Iterator[str]:
    """What a new tokenizer is trained on."""
    for task in tasks(recipe).learned:
        yield from (task.prompt, task.answer)

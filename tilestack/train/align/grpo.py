"""Group-relative policy optimisation: the model answers, a program checks, and what did better than its group is raised.

A step in four parts. The model draws a group of answers to each prompt; a verifier gives each a reward; an answer's
advantage is its reward against the others of its group, so no value model is needed; and the loss raises the tokens of
answers with an advantage and lowers the others, held near a frozen reference.

The sampler decodes token by token with a cache, the loss reads whole sequences, and the two round differently. So the
log-probabilities the ratio is taken to are not the sampler's: they are those of the loss's own first pass over the
answers, with the weights that drew them. The ratio is then exactly 1 at the first step on new answers, and where it
differs later, the policy has moved and not the arithmetic.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilestack.data import NO_LABEL, Tokenizer, corpora
from tilestack.nn.lora import lora_layers, without_lora
from tilestack.train import execution
from tilestack.train.align import examples
from tilestack.train.align.deck import Deck
from tilestack.train.align.losses import group_advantages, k3, policy_losses
from tilestack.train.evaluation.answers import answers, prompt_ids, shown_answers
from tilestack.train.evaluation.log_probs import Rows, Scored, in_rows, log_probs
from tilestack.train.objective import Loss
from tilestack.train.recipe import Recipe
from tilestack.train.settings import RecipeError, setting


@dataclass(frozen=True)
class TaskData(examples.ArithmeticData):
    """Tasks with answers that can be checked: arithmetic, or files with {"prompt": …, "answer": …} in each row."""

    corpus: str = setting("arithmetic", choices=("arithmetic", "files"))
    batch: int = setting(8, low=1)  # prompts in a micro-batch, each answered by a group


@dataclass(frozen=True)
class GRPOSettings:
    group: int = setting(8, low=2)  # answers to each prompt
    max_new_tokens: int = setting(64, low=1)
    temperature: float = setting(1.0, above=0)
    reward: str = setting("number", choices=("number", "exact"))  # the last number is the answer, or the whole text is
    beta: float = setting(0.04, low=0)  # weight of the divergence from the reference; 0 needs no reference
    divide_by_std: bool = True
    average: str = setting("token", choices=("token", "sequence"))  # tokens count alike, or answers do
    clip_low: float = setting(0.2, above=0, high=1)
    clip_high: float = setting(0.2, above=0)
    reuse: int = setting(1, low=1)  # steps taken on the same answers; more than 1 is off-policy after the first


@dataclass(frozen=True)
class GRPORecipe(Recipe):
    data: TaskData = field(default_factory=TaskData)
    grpo: GRPOSettings = field(default_factory=GRPOSettings)


REWARDS: dict[str, Callable[[corpora.Task, str], float]] = {
    "number": corpora.reward,
    "exact": lambda task, text: float(text.strip() == task.answer.strip()),
}


@dataclass
class Rollout:
    """Answers to some prompts, the answers of a group next to each other."""

    rows: Rows
    rewards: Tensor  # [prompts, group]
    advantages: Tensor  # [prompts · group]
    ended: Tensor  # [prompts · group], whether an answer ended by itself
    reference: Tensor | None  # [prompts · group, length], log-probabilities under the reference
    old: Tensor | None = None  # the same under the policy that drew them; noted by the first loss


class GRPO:
    """Rewards as an objective; see `tilestack.train.objective`."""

    def __init__(self, recipe: GRPORecipe, model: torch.nn.Module, tokenizer: Tokenizer, device: torch.device):
        self.recipe, self.settings, self.tokenizer, self.device = recipe, recipe.grpo, tokenizer, device
        self.policy = model
        self.reward = REWARDS[recipe.grpo.reward]
        learned, held = tasks(recipe.data, recipe.run.seed)
        self.tasks, self.held = self.fitting(learned), self.fitting(held)
        if not self.tasks:
            raise RecipeError(
                f"none of {len(learned)} tasks fits into data.sequence = {recipe.data.sequence} "
                f"with an answer of grpo.max_new_tokens = {recipe.grpo.max_new_tokens}"
            )
        self.reference: Any = None
        if recipe.grpo.beta:
            # With adapters, the reference is the model without them; else a copy, made before the first step.
            self.reference = model if lora_layers(model) else copy.deepcopy(model).requires_grad_(False).eval()
        self.deck = Deck(len(self.tasks), recipe.run.seed)
        self.rollouts = 0  # made so far; the next one's seed follows from it
        self.pending: list[Rollout] = []

    def fitting(self, found: list[corpora.Task]) -> list[corpora.Task]:
        room = self.recipe.data.sequence - self.settings.max_new_tokens
        return [task for task in found if len(self.prompt(task)) <= room]

    def next_batch(self) -> Rollout:
        if not self.pending:
            made = [self.rollout() for _ in range(self.recipe.data.accumulate)]
            self.pending = made * self.settings.reuse
        return self.pending.pop(0)

    def rollout(self) -> Rollout:
        """New answers of the policy as it is now, with rewards and what the reference thinks of them."""
        chosen = [self.tasks[number] for number in self.deck.deal(self.recipe.data.batch)]
        prompts = [self.prompt(task) for task in chosen for _ in range(self.settings.group)]
        was_training = self.policy.training
        self.policy.eval()
        with self.autocast():
            found = answers(
                self.policy,
                prompts,
                max_new_tokens=self.settings.max_new_tokens,
                stop=self.tokenizer.stops,
                temperature=self.settings.temperature,
                seed=self.recipe.run.seed * 1_000_003 + self.rollouts,
                device=self.device,
            )
        self.rollouts += 1
        texts = [self.tokenizer.decode(answer) for answer in found]
        asked = [task for task in chosen for _ in range(self.settings.group)]
        rewards = [self.reward(task, text) for task, text in zip(asked, texts, strict=True)]
        sequences = [Scored.answer(prompt, answer) for prompt, answer in zip(prompts, found, strict=True)]
        ended = [answer[-1] in self.tokenizer.stops for answer in found]
        made = self.assembled(in_rows(sequences), torch.tensor(rewards), torch.tensor(ended))
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
            return log_probs(self.reference, rows, self.settings.temperature)

    def loss(self, model: Any, batch: Rollout) -> Loss:
        now = log_probs(model, batch.rows, self.settings.temperature)
        if batch.old is None:
            batch.old = now.detach()
        mask = batch.rows.labels != NO_LABEL
        tokens, lengths = mask.sum(), mask.sum(-1)
        found = policy_losses(now, batch.old, batch.advantages, self.settings.clip_low, self.settings.clip_high)
        losses = found.losses * mask
        per_token = {"ratio": found.ratio, "clipped": found.clipped, "entropy": -now.detach()}
        if batch.reference is not None:
            divergence = k3(now, batch.reference)
            losses = losses + self.settings.beta * divergence
            per_token["kl"] = divergence.detach()
        by_token = self.settings.average == "token"
        total = losses.sum() if by_token else (losses.sum(-1) / lengths.clamp(min=1)).sum()
        count = tokens if by_token else torch.full_like(tokens, len(lengths))
        means = {name: (value * mask).sum() / tokens for name, value in per_token.items()} | {
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
            device=self.device,
        )
        rewards = [self.reward(task, self.tokenizer.decode(text)) for task, text in zip(held, found, strict=True)]
        return {"validation_reward": sum(rewards) / len(rewards)}

    def sample(self, model: Any) -> list[str]:
        prompts = [self.prompt(task) for task in self.held[:3]]
        return shown_answers(model, self.tokenizer, prompts, self.recipe.evaluation, self.device)

    def prompt(self, task: corpora.Task) -> list[int]:
        return prompt_ids(self.tokenizer, [examples.user(task.prompt)])

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


def tasks(settings: TaskData, seed: int) -> tuple[list[corpora.Task], list[corpora.Task]]:
    """Tasks to learn from and tasks held out."""
    if settings.corpus == "files":
        found = examples.from_files(settings.files, examples.task, settings.examples)
    else:
        found = examples.arithmetic(settings, seed)
    return examples.split(found, lambda task: task.prompt, settings.validation, seed)


def texts(recipe: GRPORecipe) -> Iterator[str]:
    """What a new tokenizer is trained on."""
    for task in tasks(recipe.data, recipe.run.seed)[0]:
        yield from (task.prompt, task.answer)

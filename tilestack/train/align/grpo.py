"""Group-relative policy optimisation: the model answers, a program checks, and what did better than its group is raised.

A step in four parts. The model draws a group of answers to each prompt; a verifier gives each a reward; an answer's
advantage is its reward against the others of its group, so no value model is needed; and the loss raises the tokens of
answers with an advantage and lowers the others, held near a frozen reference.

The sampler decodes token by token with a cache, the loss reads whole sequences, and the two round differently. So the
log-probabilities the ratio is taken to are not the sampler's: they are those of the loss's own first pass over the
answers, with the weights that drew them. The ratio is then exactly 1 at the first step on new answers, and where it
differs later, the policy has moved and not the arithmetic. With `batch_invariant` both sides run in the batch-invariant mode
(models/invariant.py), and the sampler's own log-probabilities are those of the loss, bit for bit.

Of several processes with other texts each answers its share of the prompts, with an engine of its own. A group is never shared,
and what is drawn for an answer follows from its place among those of all processes. A divided model answers as a whole copy,
gathered for the time.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilestack.data import NO_LABEL, Tokenizer, corpora, formats
from tilestack.nn.lora import lora_layers, without_lora
from tilestack.parallel.placement import Placement
from tilestack.train import execution
from tilestack.train.align import examples, rewards
from tilestack.train.align.deck import Deck, digest_of
from tilestack.train.align.losses import group_advantages, k3, policy_losses, weighted_k3
from tilestack.train.align.reference import FrozenWeights
from tilestack.train.evaluation.answers import (
    answers,
    answers_and_log_probs,
    context_for,
    prompt_ids,
    shown_answers,
)
from tilestack.train.evaluation.log_probs import Rows, Scored, in_rows, invariant_log_probs, log_probs
from tilestack.train.objective import Loss
from tilestack.train.settings import RecipeError, setting

# Prompts and answers, one of each for every row, what the sampler says of the answers' tokens, and rewards.
Drawn = tuple[list[list[int]], list[list[int]], list[list[float]] | None, list[float]]


@dataclass(frozen=True)
class TaskData(examples.ArithmeticData):
    """Tasks with answers that can be checked: arithmetic, or rows of files in the format of `data.formats`."""

    corpus: str = setting("arithmetic", "what to learn from", choices=("arithmetic", "files"))
    batch: int = setting(8, "prompts in a micro-batch, each answered by a group", low=1, operational=True)
    system: str = setting("", "a system prompt before every task that has none of its own")


@dataclass(frozen=True)
class GRPOSettings:
    group: int = setting(8, "answers to each prompt", low=2)
    max_new_tokens: int = setting(64, "the longest answer", low=1)
    temperature: float = setting(1.0, "of the answers, and of the loss", above=0)
    reward: str = setting("number", "number: the last number is the answer; exact: the whole text is; rewards.py:score: a function of yours")  # fmt: skip
    beta: float = setting(0.04, "weight of the divergence from the reference; 0 needs no reference", low=0)
    weighted_kl: bool = setting(False, "multiply the divergence by the ratio, which makes its gradient that of KL(policy ‖ reference)")  # fmt: skip
    divide_by_std: bool = setting(True, "divide advantages by the standard deviation of their group")
    average: str = setting("token", "tokens count alike, or answers do: by the mean of their tokens, or by their sum over max_new_tokens", choices=("token", "sequence", "constant"))  # fmt: skip
    ratio: str = setting("token", "what is clipped: the ratio of each token, or of whole answers, as in GSPO", choices=("token", "sequence"))  # fmt: skip
    clip_low: float = setting(0.2, "how far below 1 the ratio may fall", above=0, high=1)
    clip_high: float = setting(0.2, "how far above 1 the ratio may rise", above=0)
    reuse: int = setting(1, "steps taken on the same answers; more than 1 is off-policy after the first", low=1)
    mask_truncated: bool = setting(False, "learn nothing from answers that max_new_tokens cut short")
    batch_invariant: bool = setting(False, "answer and learn in the batch-invariant mode: what the sampler says of its tokens is what the loss finds, to the bit; slower")  # fmt: skip

    def __post_init__(self) -> None:
        rewards.check_name(self.reward)
        if self.ratio == "sequence" and self.average != "sequence":
            raise RecipeError(
                f'grpo.ratio = "sequence" needs grpo.average = "sequence", not "{self.average}": an answer with one ratio counts '
                "once, however long it is"
            )
        if self.weighted_kl and not self.beta:
            raise RecipeError(
                "grpo.weighted_kl has no meaning where grpo.beta is 0: there is no divergence to multiply"
            )
        if self.batch_invariant and self.temperature != 1:
            raise RecipeError(
                f"grpo.batch_invariant needs grpo.temperature = 1, not {self.temperature}: the sampler tells the model's own log-probabilities"
            )


@dataclass(frozen=True)
class GRPORecipe(examples.AlignmentRecipe):
    data: TaskData = field(default_factory=TaskData)
    grpo: GRPOSettings = field(default_factory=GRPOSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grpo.batch_invariant and self.parallel.divides:
            raise RecipeError(
                "grpo.batch_invariant needs the whole model in every process: leave out parallel.shard and parallel.tensor"
            )


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
    reward_figures: dict[str, Tensor] = field(default_factory=dict)  # of all prompts of its step, on all processes


class GRPO:
    """Rewards as an objective; see `tilestack.train.objective`."""

    def __init__(self, recipe: GRPORecipe, placement: Placement, tokenizer: Tokenizer, device: torch.device):
        self.recipe, self.settings, self.tokenizer, self.device = recipe, recipe.grpo, tokenizer, device
        self.placement, self.mesh, self.policy = placement, placement.mesh, placement.model
        self.reward = rewards.find_reward(recipe.grpo.reward)
        found = tasks(recipe)
        self.tasks, sources = self.fitting(found.learned, found.sources)
        self.held, _ = self.fitting(found.held, [0] * len(found.held))
        self.counts = {
            "tasks": len(found.learned), "too long for data.sequence": len(found.learned) - len(self.tasks),
            **found.left_out,
            "held out": len(found.held), "held out and too long": len(found.held) - len(self.held),
        }  # fmt: skip
        if not self.tasks:
            raise RecipeError(
                f"none of {len(found.learned)} tasks fits into data.sequence = {recipe.data.sequence} "
                f"with an answer of grpo.max_new_tokens = {recipe.grpo.max_new_tokens}"
            )
        if getattr(self.policy, "rotates_by_length", False):
            refuse_other_rotation(self.policy, [len(self.prompt(task)) for task in self.tasks], self.settings)
        self.has_reference = bool(recipe.grpo.beta)
        self.found_weights = None
        if self.has_reference and not lora_layers(self.policy):  # else the reference is the model without adapters
            self.found_weights = FrozenWeights(placement)
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
            self.note_figures(made)
            self.pending = made * self.settings.reuse
        return self.pending.pop(0)

    def rollout(self) -> Rollout:
        """New answers of the policy as it is now, with rewards and what the reference thinks of them."""
        dealt = self.deck.deal(self.recipe.data.batch * self.mesh.size("data"))
        chosen = [self.tasks[number] for number in self.mesh.share(dealt, "data")]
        was_training = self.policy.training
        self.policy.eval()
        drawn = self.drawn(self.placement.whole_copy(self.policy), chosen)
        if self.mesh.size("tensor") > 1:  # those that share a model learn from the answers of the first of them
            drawn = json.loads(self.mesh.texts(json.dumps(drawn), "tensor")[0])
        prompts, found, told, rewards = drawn
        self.rollouts += 1
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

    def drawn(self, policy: Any, chosen: Sequence[corpora.Task]) -> Drawn:
        """A group of answers to each task, with rewards, and what the sampler says of their tokens where that is asked."""
        if self.mesh.index("tensor"):
            return [], [], None, []
        prompts = [prompt for task in chosen for prompt in [self.prompt(task)] * self.settings.group]
        asked: dict[str, Any] = dict(
            max_new_tokens=self.settings.max_new_tokens,
            stop=self.tokenizer.stops,
            seed=self.recipe.run.seed * 1_000_003 + self.rollouts,
            first=self.mesh.index("data") * len(prompts),
        )
        told = None
        with self.autocast():
            if self.settings.batch_invariant:
                found, told = answers_and_log_probs(policy, prompts, **asked)
            else:
                found = answers(policy, prompts, temperature=self.settings.temperature, **asked)
        texts = [self.tokenizer.decode(answer) for answer in found]
        answered = [task for task in chosen for _ in range(self.settings.group)]
        rewards = [self.reward(task, text) for task, text in zip(answered, texts, strict=True)]
        return prompts, found, told, rewards

    def assembled(self, rows: Rows, rewards: Tensor, ended: Tensor) -> Rollout:
        rows, grouped = rows.to(self.device), rewards.view(-1, self.settings.group).to(self.device)
        advantages = group_advantages(grouped, self.settings.divide_by_std).view(-1)
        return Rollout(rows, grouped, advantages, ended.to(self.device), self.reference_log_probs(rows))

    def note_figures(self, made: Sequence[Rollout]) -> None:
        """Let rollouts of one step know the figures of their rewards."""
        figures = self.reward_figures(torch.cat([rollout.rewards for rollout in made]))
        for rollout in made:
            rollout.reward_figures = figures

    def reward_figures(self, rewards: Tensor) -> dict[str, Tensor]:
        """Mean and standard deviation of the rewards of all processes, and the share of groups whose answers earn the same, of
        which nothing can be learned."""
        parts = {"sum": rewards, "squares": rewards.double().square(), "answers": torch.ones_like(rewards)}
        alike = rewards.std(-1) == 0
        parts |= {"alike": alike, "groups": torch.ones_like(alike)}
        whole = self.mesh.sums({name: part.sum() for name, part in parts.items()}, "data")
        mean = whole["sum"] / whole["answers"]
        spread = (whole["squares"] - whole["sum"] * mean).clamp(min=0) / (whole["answers"] - 1)
        return {"reward": mean, "reward_std": spread.sqrt(), "groups_alike": whole["alike"] / whole["groups"]}

    @torch.no_grad()
    def reference_log_probs(self, rows: Rows) -> Tensor | None:
        if not self.has_reference:
            return None
        was_training = self.policy.training
        self.policy.eval()
        found_weights = self.found_weights.applied() if self.found_weights else nullcontext()
        with self.autocast(), without_lora(self.policy), found_weights:
            found = self.log_probs(self.policy, rows)
        self.policy.train(was_training)
        return found

    def log_probs(self, model: Any, rows: Rows) -> Tensor:
        if self.settings.batch_invariant:
            return invariant_log_probs(model, rows)
        return log_probs(model, rows, self.settings.temperature)

    def loss(self, model: Any, batch: Rollout) -> Loss:
        now = self.log_probs(model, batch.rows)
        if batch.old is None:
            batch.old = now.detach()
        answers = batch.rows.labels != NO_LABEL
        mask = answers & batch.ended[:, None] if self.settings.mask_truncated else answers
        losses, per_token = self.token_losses(now, batch.old, batch, answers)
        lengths, tokens = answers.sum(-1), mask.sum()
        divisor: Tensor | int = 1
        if self.settings.average != "token":
            divisor = lengths.clamp(min=1) if self.settings.average == "sequence" else self.settings.max_new_tokens
        total = ((losses * mask).sum(-1) / divisor).sum()
        own = tokens if self.settings.average == "token" else mask.any(-1).sum()
        drawn = torch.full_like(own, len(lengths))
        of_tokens = {name: (value * mask).sum() for name, value in per_token.items()}
        of_answers = {name: mean.float() * drawn for name, mean in batch.reward_figures.items()}
        of_answers |= {"answer_tokens": lengths.sum(), "cut_short": (~batch.ended).sum()}
        weights = dict.fromkeys(of_tokens, tokens) | dict.fromkeys(of_answers, drawn)
        return Loss(total, own, of_tokens | of_answers, tokens=batch.rows.ids.numel(), weights=weights)

    def token_losses(
        self, now: Tensor, old: Tensor, batch: Rollout, answers: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every token, and figures of it; `answers` are the tokens that are some answer's."""
        settings = self.settings
        whole = answers if settings.ratio == "sequence" else None
        found = policy_losses(now, old, batch.advantages, settings.clip_low, settings.clip_high, whole)
        figures = {"ratio": found.ratio, "clipped": found.clipped, "entropy": -now.detach()}
        if batch.reference is None:
            return found.losses, figures
        divergence = weighted_k3(now, old, batch.reference) if settings.weighted_kl else k3(now, batch.reference)
        return found.losses + settings.beta * divergence, figures | {"kl": divergence.detach()}

    def evaluate(self, model: Any) -> dict[str, float]:
        """The mean reward of the likeliest answers to tasks held out."""
        held = self.held[: self.recipe.evaluation.batches * self.recipe.data.batch]
        if not held:
            return {}
        found = answers(
            self.placement.whole_copy(model),
            [self.prompt(task) for task in held],
            max_new_tokens=self.settings.max_new_tokens,
            stop=self.tokenizer.stops,
        )
        rewards = [self.reward(task, self.tokenizer.decode(text)) for task, text in zip(held, found, strict=True)]
        return {"validation_reward": sum(rewards) / len(rewards)}

    def sample(self, model: Any) -> list[str]:
        prompts = [self.prompt(task) for task in self.held[:3]]
        return shown_answers(self.placement.whole_copy(model), self.tokenizer, prompts, self.recipe.evaluation)

    def prompt(self, task: corpora.Task) -> list[int]:
        messages = list(task.messages) or [formats.user(task.prompt)]
        if self.recipe.data.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.recipe.data.system}, *messages]
        return prompt_ids(self.tokenizer, messages, formats.tools_of(task.row))

    def autocast(self) -> AbstractContextManager[Any]:
        return execution.autocast(self.recipe.precision, self.device)

    def state_dict(self) -> dict[str, Any]:
        """The place among the tasks, how many rollouts there were, and answers that further steps will use, those of all
        processes."""
        made = list({id(rollout): rollout for rollout in self.pending}.values())
        told = self.mesh.texts(json.dumps([saved(rollout) for rollout in made]), "data")
        return {
            "deck": self.deck.state_dict(),
            "rollouts": self.rollouts,
            "made": [joined_rollouts(parts) for parts in zip(*map(json.loads, told), strict=True)],
            "pending": [next(n for n, each in enumerate(made) if each is rollout) for rollout in self.pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.deck.load_state_dict(state["deck"])
        self.rollouts = state["rollouts"]
        made = [self.restored(each) for each in state["made"]]
        if made:
            self.note_figures(made)
        self.pending = [made[number] for number in state["pending"]]

    def restored(self, state: dict[str, Any]) -> Rollout:
        """This process's share of a rollout, in whole groups."""
        groups = self.mesh.share(range(len(state["rewards"])), "data")
        if not groups:
            raise RecipeError(
                f"the answers that the run still learns from are to {len(state['rewards'])} prompts, too few for "
                f"{self.mesh.size('data')} processes with other texts; go on with at most so many"
            )
        mine = slice(groups[0] * self.settings.group, (groups[-1] + 1) * self.settings.group)
        rows = Rows(filled_rows(state["ids"][mine], 0), filled_rows(state["labels"][mine], NO_LABEL))
        rewards = torch.tensor(state["rewards"][groups[0] : groups[-1] + 1])
        rollout = self.assembled(rows, rewards, torch.tensor(state["ended"][mine]))
        rollout.old = None if state["old"] is None else filled_rows(state["old"][mine], 0.0).to(self.device)
        return rollout


def refuse_other_rotation(model: Any, prompts: Sequence[int], settings: GRPOSettings) -> None:
    """Refuse prompts, by their lengths, whose answers one model would draw and another would learn (longrope).

    The sampler rotates every text by its context, which has room for the longest; the loss rotates each by its own length.
    They agree where all are short to the model, or all are long.
    """
    most, context = model.rotary.most, context_for(model, max(prompts) + settings.max_new_tokens)
    if context > most and min(prompts) <= most:
        raise RecipeError(
            f"this model rotates texts of more than {most} tokens by other frequencies "
            f"({model.config.rope_scaling['rope_type']}). Answers to these tasks would be drawn by those, in a context of "
            f"{context} tokens (prompt, grpo.max_new_tokens and one), and the shorter ones learned without. Set data.sequence "
            f"to {most - 1} or less, which leaves out longer tasks, or shorten grpo.max_new_tokens"
        )


def filled_rows(rows: Sequence[Sequence[Any]], filling: Any) -> Tensor:
    """Rows as one tensor, filled on the right: those of other processes may have other lengths."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filling] * (longest - len(row))] for row in rows])


def joined_rollouts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What several processes have saved of a rollout, one after another."""
    return {
        name: None if parts[0][name] is None else [row for part in parts for row in part[name]] for name in parts[0]
    }


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

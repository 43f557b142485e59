"""A model whose next token depends on the last alone, so that its likelihoods can be written out; and its tokenizer."""

from itertools import pairwise

import torch
from torch import nn


class Bigrams(nn.Module):
    logit_softcap = 0.0

    def __init__(self, vocabulary: int = 64, hidden: int = 6, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(vocabulary, hidden, generator=generator))
        self.head_weight = nn.Parameter(torch.randn(vocabulary, hidden, generator=generator))

    def hidden(self, ids, positions=None, cu_seqlens=None):
        return self.embedding[ids]

    def table(self):
        """log p(next | last), [vocabulary, vocabulary] in float64."""
        return (self.embedding.double() @ self.head_weight.double().T).log_softmax(-1).detach()

    def log_prob(self, ids):
        return sum(self.table()[a, b].item() for a, b in pairwise(ids))


class Letters:
    """A token for each lower-case letter, space and mark; 0 is the end of text."""

    known = "\0 abcdefghijklmnopqrstuvwxyz.,?!0123456789+-*/=:"
    bos, eos, pad, stops = None, 0, None, (0,)
    vocabulary = len(known)

    def encode(self, text, *, bare=False):
        return [self.known.index(letter) for letter in text]

    def decode(self, ids, *, special=False):
        return "".join(self.known[i] for i in ids if i)

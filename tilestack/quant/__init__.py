"""Numbers of 8 and 4 bits in place of a model's weights: schemes, layers made of codes, and how checkpoints hold them."""

from tilestack.quant.linear import QuantisedLinear
from tilestack.quant.schemes import SCHEMES, Codes, Scheme

__all__ = ["SCHEMES", "Codes", "QuantisedLinear", "Scheme"]

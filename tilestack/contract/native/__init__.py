"""The contract's C++: the signature of a call, and gradients without the Python of `torch.autograd.Function`. Nothing needs it."""

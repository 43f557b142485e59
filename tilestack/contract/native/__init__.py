"""The contract's C++: calls that want a gradient, without the Python of `torch.autograd.Function`. Nothing needs it."""

"""Steps of optimizers over many tensors in one launch, and the norm of all gradients."""

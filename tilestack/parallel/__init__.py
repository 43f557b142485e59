"""Models on several GPUs: what torch.distributed does not already do, as functions that take a process group."""

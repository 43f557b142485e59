"""Inference: requests come, a scheduler chooses what each step computes, a runner computes it, and text streams back."""

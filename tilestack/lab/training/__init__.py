"""Training measured: how fast, and how true to the definitions.

speed     `bench_train` compares whole steps (`train_steps`, on a CPU in turns: `train_turns`), `bench_layers` single layers
          (`layer_candidates`); `plain_model` is the decoder in plain PyTorch that both are held against
losses    `parity` trains on the definitions and on kernels, and `loss_curves` keeps the curves; `chain` runs recipes one after another
"""

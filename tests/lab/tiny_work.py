"""A model small enough to train in a test, as the benchmarks of training and of layers are given one."""

from tilestack.lab.training.train_steps import Work

TINY = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
WORK = Work("tiny", TINY, 2, 16, "float32", "cpu", warmup=1, steps=2)

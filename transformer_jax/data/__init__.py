"""From sentence pairs to batches of token ids: sources, tokenizers, batching. NumPy only, no JAX."""

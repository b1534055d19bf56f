"""To and from other software: PyTorch, annotated-transformer, fairseq, Hugging Face Marian, CTranslate2."""

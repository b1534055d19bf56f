"""Constituency parsing as translation (paper section 6.3): trees, trees as sequences of tokens, bracketing F1."""

"""Constituency parsing as translation (paper section 6.3): trees, their linearization, and bracketing F1."""

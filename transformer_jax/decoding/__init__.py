"""From probabilities of the next token to translations: search, its scores, and the translator (paper section 6.1)."""

"""The experiments of the paper: Table 3, training cost, constituency parsing."""

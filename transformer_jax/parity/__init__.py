"""The parity report: the same weights here and in other software, compared layer by layer."""

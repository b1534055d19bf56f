"""The model of the paper's section 3: one file a subsection."""

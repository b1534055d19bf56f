"""Pictures of runs: attention as a page to explore or a figure for a paper, and plots of training."""

"""The run folder: checkpoints and every other file that later commands need."""

"""The run: one folder with all that later commands need."""

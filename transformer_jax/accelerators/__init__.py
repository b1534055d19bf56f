"""Programs for accelerators that are not here: compile them, count what they do, and estimate their time."""

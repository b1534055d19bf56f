"""Process set-up, files and communication between processes."""

"""What is decided: pure values and functions, equal on all ranks."""

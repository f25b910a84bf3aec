"""One question a bench. Each module has `measure(progress) -> list[Row]` and checks its results."""

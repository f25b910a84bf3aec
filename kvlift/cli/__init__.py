"""The command `kvlift`: one module a subcommand."""

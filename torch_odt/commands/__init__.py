"""What the command `torch-odt` can do: one file per command, and the few that they share."""

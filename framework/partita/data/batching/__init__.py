"""Plan which rows go into which batch, and the position in that plan."""

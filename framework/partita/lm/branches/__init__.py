"""Several answers to a prompt in one row, such as the chosen and the rejected answer of a pair."""

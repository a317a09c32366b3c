"""Choice of the next token of a row, from its settings, its grammar and its prompt."""

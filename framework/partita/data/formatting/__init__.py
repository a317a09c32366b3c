"""Format rows as text and tokenize them."""

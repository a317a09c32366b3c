"""From rows to text and token ids."""

"""Export of a model in the formats of other programs, each checked against the model, and its page on the Hub."""

"""From rows to answers, and from answers to values: engine, journal, decoder, metrics, predictions."""

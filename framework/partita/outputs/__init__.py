"""Types of outputs: how answers are constrained, decoded and scored. `registry` is the table of types."""

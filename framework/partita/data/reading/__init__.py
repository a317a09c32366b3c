"""Files, Hub data sets and things in memory as rows."""

"""Other tools' configurations, and the names that they use for ours."""

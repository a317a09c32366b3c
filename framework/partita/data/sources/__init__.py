"""Open files, Hub datasets and in-memory data as rows."""

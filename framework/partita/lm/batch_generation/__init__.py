"""Generation in batches of rows that start and end together, and several answers to a prompt in one row.

Also what files show of both before a run.
"""

"""Distributed execution: the rank of this process, launching, and collectives.

Only this package knows how processes are started and find each other. Code that runs on several processes gets a
`partita_trainers.process_group.ProcessGroup`.
"""

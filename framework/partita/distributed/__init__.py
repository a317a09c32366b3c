"""More than one process: where this one stands, how they are started, what they do together.

Nothing outside this room knows how processes find each other. What runs on several of them is handed a
`partita_trainers.process_group.ProcessGroup`.
"""

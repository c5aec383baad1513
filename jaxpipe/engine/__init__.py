"""How long a table takes and what it holds: costs, timelines, critical paths, lock-step execution.

May import `table`.
"""

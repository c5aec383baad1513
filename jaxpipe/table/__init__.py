"""What a schedule is: actions, placements, tables as text and as arrays, and the rules a table
obeys.

May import `errors` alone.  No JAX here, nor in any room up to `cli`.
"""

"""Table -> Program: ticks, segments whose code is shared, exchanges, slots; `plan` runs the passes
and chooses among candidates.
"""

IMPORTS = ("engine", "program", "table", "transforms")

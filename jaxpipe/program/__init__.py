"""The waist: the lowered program as typed records, printed and verified.  Every lowering makes one,
every executor runs one.
"""

IMPORTS = ("errors", "table")

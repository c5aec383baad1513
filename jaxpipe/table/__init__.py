"""What a schedule is: actions, placements, tables as text and as arrays, and the rules a table
obeys.

No JAX here, nor in any room up to `cli`.
"""

from .kinds import Cell, Release
from .schedule import Certificate, Objective, Proof
from .text import parse_action, parse_cell

__all__ = ["Cell", "Certificate", "Objective", "Proof", "Release", "parse_action", "parse_cell"]

IMPORTS = ("errors",)

"""Layers -> stages: layout strings, and balanced layouts.

May import `table`.
"""

"""Table -> table, valid in and valid out: transfers or recomputation added, backwards split or
merged, forwards alone.

May import `table` and `engine`.
"""

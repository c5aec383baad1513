"""Table -> table, valid in and valid out: transfers added, backwards split or merged, forwards alone.

May import `table` and `simulation`.
"""

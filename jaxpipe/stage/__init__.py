"""A user's function -> the code of its forward, full backward, input gradient and weight gradient.

May import `model`, `jaxprs` and `program`.
"""

"""The parts of examples/llama.py: the model and its published sizes, Hugging Face's files, packed
batches, flags.
"""

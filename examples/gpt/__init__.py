"""The parts of examples/train_gpt.py: model, data, optimizer, checkpoints,
verification, reporting.
"""

"""The parts of examples/moe.py: published sizes, the experts, and the model around them."""

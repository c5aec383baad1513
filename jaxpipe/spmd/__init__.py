"""Program + stage code -> the body of one `shard_map`.

May import `stage`, `model`, `jaxprs`, `lowering` and `program`.
"""

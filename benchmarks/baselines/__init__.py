"""What jaxpipe is measured against: textbook versions of the usual ways, each short and as fast as
it can be made without tricks.
"""

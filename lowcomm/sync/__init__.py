"""When, with whom, in which bytes. Knows tensors, knows no optimizer."""

from lowcomm.sync.seam import Group

__all__ = ["Group"]

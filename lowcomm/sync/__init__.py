"""When, with whom, in which bytes. Knows tensors, knows no optimizer."""

from lowcomm.sync.group import Group

__all__ = ["Group"]

"""When, with whom, in which bytes. Knows tensors, knows no optimizer."""

from lowcomm.sync.codec import Codec, make_codec
from lowcomm.sync.seam import Group

__all__ = ["Codec", "Group", "make_codec"]

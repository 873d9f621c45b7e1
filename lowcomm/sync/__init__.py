"""When, with whom, in which bytes. Knows tensors, knows no optimizer."""

from lowcomm.sync.codec import BF16, Codec, Int4, Int8, TopK, make_codec
from lowcomm.sync.elastic import Change, ElasticGroup
from lowcomm.sync.private import PrivateGroup
from lowcomm.sync.seam import Group

__all__ = [
    "BF16",
    "Change",
    "Codec",
    "ElasticGroup",
    "Group",
    "Int4",
    "Int8",
    "PrivateGroup",
    "TopK",
    "make_codec",
]

"""Values inside of tuples, lists and dicts."""

from collections import OrderedDict

from fxtune.techniques.checkpointing.offload import leaves


def test_all_values_are_found_in_order():
    value = (1, [2, {"a": 3, "b": (None, "text")}], OrderedDict(x=[4]), [], {})
    assert list(leaves(value)) == [1, 2, 3, None, "text", 4]
    assert list(leaves(5)) == [5]

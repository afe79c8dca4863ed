"""The ways to share the work of several ranks."""

from fxtune.distributed.degrees import Degrees, possible_degrees


def test_every_way_is_listed_once_and_copies_come_first():
    found = list(possible_degrees(4))
    assert found[0] == Degrees(replicate=4)
    assert len(found) == len(set(found)) == 6
    assert all(one.ranks == 4 for one in found)
    assert [one.context for one in found] == sorted(one.context for one in found)
    assert list(possible_degrees(1)) == [Degrees()]


def test_degrees_name_what_is_shared():
    assert str(Degrees()) == "one rank"
    assert str(Degrees(2, 1, 4)) == "replicate 2, context 4"
    assert Degrees(2, 3, 4).rows == 6

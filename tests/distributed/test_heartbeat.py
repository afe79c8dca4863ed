"""What each rank notes about itself, and what survives in its file."""

from fxtune.distributed.heartbeat import Heartbeat, read


def test_heartbeat_survives_in_its_file(tmp_path):
    beat = Heartbeat(tmp_path / "1")
    beat.doing("forward and backward", 7)
    with beat.waiting("adding up gradients"):
        found = read(tmp_path)[1]
        assert (found.step, found.doing, found.waits) == (7, "adding up gradients", True)
    assert str(read(tmp_path)[1]) == "step 7, forward and backward"
    (tmp_path / "2").write_bytes(b"half a no")
    assert list(read(tmp_path)) == [1]

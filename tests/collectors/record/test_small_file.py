"""Files in folders where others may have put something else: nothing waits, grows without end, or is overwritten."""

import os

import pytest

from tests.cases import case
from tracekit.collectors.record.small_file import create, open_regular, open_to_read, read_small, write_whole

#: What can be in the place of a file -> why it is not read.
IN_THE_WAY = {
    "pipe": (os.mkfifo, "not a regular file"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
    "link": (lambda path: path.symlink_to(path.with_name("victim")), "a link, which is not followed"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "a link, which is not followed"),
    "large": (lambda path: path.write_bytes(bytes(65_537)), "more than 65,536 bytes"),
    "sparse": (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "more than 65,536 bytes"),
}


@pytest.fixture
def place(tmp_path):
    """For a file, beside one that must not change."""
    (tmp_path / "victim").write_text("precious")
    yield tmp_path / "place"
    assert {path.read_text() for path in tmp_path.rglob("victim")} == {"precious"}


def taken(place, *names):
    """(what is there, such a place with it), one after the other."""
    for name in names or IN_THE_WAY:
        own = place.with_name(name) / "place"
        own.parent.mkdir()
        own.with_name("victim").write_text("precious")
        IN_THE_WAY[name][0](own)
        yield name, own


def test_only_small_regular_files_are_read(place):
    for name, own in taken(place):
        with case(name), pytest.raises(OSError, match=IN_THE_WAY[name][1]):
            read_small(own)


def test_a_file_is_only_made_where_nothing_is(place):
    for name, own in taken(place):
        before = own.lstat()
        with case(name), pytest.raises(FileExistsError):
            create(own)
        assert own.lstat() == before, name


def test_only_a_regular_file_is_continued(place):
    for name, own in taken(place, "pipe", "folder", "link", "endless"):
        with case(name):
            with pytest.raises(OSError, match=r".") as raised:
                create(own, append=True)
            assert not isinstance(raised.value, FileExistsError)


def test_a_whole_file_takes_the_place_of_what_was_there(place):
    """And of what a killed writer left."""
    for name, own in taken(place, "pipe", "link", "endless", "large"):
        own.with_name(".place").symlink_to("victim")
        with case(name):
            write_whole(own, b"whole")
            assert read_small(own) == b"whole"
            assert sorted(path.name for path in own.parent.iterdir()) == ["place", "victim"]


def test_a_recording_is_read_through_links_but_not_from_a_device(place):
    place.symlink_to("victim")
    with open_to_read(place) as file:
        assert file.read() == b"precious"
    place.unlink()
    place.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        open_to_read(place)


def test_the_limit_is_inclusive(place):
    place.write_bytes(bytes(65_536))
    assert len(read_small(place)) == 65_536
    place.unlink()


def test_a_new_file_is_one_that_others_may_read_and_only_its_owner_may_write(tmp_path):
    before = os.umask(0)
    try:
        os.close(open_regular(tmp_path / "new", os.O_WRONLY | os.O_CREAT))
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o644

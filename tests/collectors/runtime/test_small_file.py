"""Files in folders where others may have put something else: nothing waits, grows without end, or is overwritten."""

import os

import pytest

from tracekit.collectors.runtime.small_file import create, open_to_read, read_small, write_whole

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
    (tmp_path / "victim").write_text("precious")
    yield tmp_path / "place"
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_only_small_regular_files_are_read(name, place):
    make, why = IN_THE_WAY[name]
    make(place)
    with pytest.raises(OSError, match=why):
        read_small(place)


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_a_file_is_only_made_where_nothing_is(name, place):
    IN_THE_WAY[name][0](place)
    before = place.lstat()
    with pytest.raises(FileExistsError):
        create(place)
    assert place.lstat() == before


@pytest.mark.parametrize("name", ["pipe", "folder", "link", "endless"])
def test_only_a_regular_file_is_continued(name, place):
    IN_THE_WAY[name][0](place)
    with pytest.raises(OSError, match=r".") as raised:
        create(place, append=True)
    assert not isinstance(raised.value, FileExistsError)


@pytest.mark.parametrize("name", ["pipe", "link", "endless", "large"])
def test_a_whole_file_takes_the_place_of_what_was_there(name, place):
    """And of what a killed writer left."""
    IN_THE_WAY[name][0](place)
    place.with_name(".place").symlink_to("victim")
    write_whole(place, b"whole")
    assert read_small(place) == b"whole"
    assert sorted(path.name for path in place.parent.iterdir()) == ["place", "victim"]


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

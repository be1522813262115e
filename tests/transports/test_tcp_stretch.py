"""The order in which a payload's bytes go out while it is written: every byte once, and the same order again."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from omnikv.transports.shm_pool import Room
from omnikv.transports.tcp_messages import LONGEST_PIECE_NBYTES, PIECE_NBYTES
from omnikv.transports.tcp_stretch import Sending, Stretch

MIB = 1 << 20
# Cut so that some ranges are too small to go out by themselves.
CUT_NBYTES = PIECE_NBYTES // 2


def stretch_of(nbytes):
    return Stretch(Room(SimpleNamespace(view=memoryview(bytearray(nbytes))), offset=0, nbytes=nbytes), token=1)


def pieces_of(sending, most=None):
    """Where the next pieces begin and end: all that can be sent now, or `most` of them."""
    pieces = []
    while sending.has_piece and (most is None or len(pieces) < most):
        begin, piece = sending.next_piece(LONGEST_PIECE_NBYTES)
        pieces.append((begin, begin + len(piece)))
    return pieces


def test_ranges_that_follow_one_another_go_out_as_one_long_piece():
    stretch = stretch_of(4 * MIB)
    for begin in range(0, 4 * MIB, MIB):
        assert stretch.wrote(begin, begin + MIB)
    assert pieces_of(Sending(1, stretch, 0)) == [(0, 4 * MIB)]


def test_a_range_that_grows_after_it_was_sent_is_sent_on():
    stretch = stretch_of(4 * MIB)
    sending = Sending(1, stretch, 0)
    assert not sending.has_piece
    sent = []
    for begin in range(0, 4 * MIB, MIB):
        stretch.wrote(begin, begin + MIB)
        sent += pieces_of(sending)
    assert sent == [(begin, begin + MIB) for begin in range(0, 4 * MIB, MIB)]
    assert not sending.has_ended
    stretch.finish()
    assert sending.has_ended


def test_small_ranges_wait_until_their_neighbours_make_a_piece_of_them():
    stretch = stretch_of(2 * MIB)
    assert not stretch.wrote(0, 1000)
    assert not stretch.wrote(2000, MIB)
    assert stretch.wrote(1000, 2000)
    assert pieces_of(Sending(1, stretch, 0)) == [(0, MIB)]


@given(data=st.data())
def test_every_byte_goes_out_once_and_a_pull_that_comes_again_gets_the_rest_in_the_same_order(data):
    count = data.draw(st.integers(1, 12))
    stretch = stretch_of(count * CUT_NBYTES)
    first, order = Sending(1, stretch, 0), []
    for cut in data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]:
        stretch.wrote(cut * CUT_NBYTES, (cut + 1) * CUT_NBYTES)
        order += pieces_of(first, data.draw(st.integers(0, 2)))
    sent_nbytes = sum(end - begin for begin, end in order)
    stretch.finish()
    order += pieces_of(first)
    assert first.has_ended
    cuts = [at for begin, end in order for at in range(begin, end, CUT_NBYTES)]
    assert sorted(cuts) == [cut * CUT_NBYTES for cut in range(count)]
    again = [at for begin, end in pieces_of(Sending(2, stretch, sent_nbytes)) for at in range(begin, end, CUT_NBYTES)]
    assert again == cuts[sent_nbytes // CUT_NBYTES :]

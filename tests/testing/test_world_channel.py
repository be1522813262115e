"""The channel's own ledgers, with the bytes that they really send, in simulated groups: they end as the steps do."""

from __future__ import annotations

import msgspec
import pytest
from ledger_lanes import LedgerLane

from omnikv.core.messages import Kept, Rulings, Votes
from omnikv.errors import LocalProtocolError, RemoteProtocolError
from omnikv.groups.channel_call import Call
from omnikv.groups.channel_follower import FollowerLedger
from omnikv.groups.channel_leader import LeaderLedger
from omnikv.testing import World

decode = msgspec.msgpack.Decoder(Votes | Kept | Rulings).decode


class LedgerSeat:
    """A ledger with the caller and the connections of a simulated rank; ballots of a short while go out together."""

    def __init__(self, seats, rank, ledger, tell, peers):
        self.seats, self.rank, self.ledger, self.tell = seats, rank, ledger, tell
        self.lane = LedgerLane(ledger, peers, is_open=seats.has_lane)
        seats.lanes.append(self.lane)
        self.calls = {}
        self.votes = []

    def cast(self, key, ballot):
        self.votes.append((key, ballot))
        if not self.seats.hold_s:
            self.cast_together()
        elif len(self.votes) == 1:
            self.seats.world.wake(self.rank, self.seats.hold_s, self.cast_together)

    def cast_together(self):
        votes, self.votes = self.votes, []
        if self.ledger.broken:
            for key, _ in votes:
                self.tell(key, self.ledger.broken)
            return
        if not votes:
            return
        call = Call(votes, deadline=0.0)
        self.calls.update(dict.fromkeys(call.keys, call))
        self.seats.batches.append(len(votes))
        self.lane.cast(call)
        self.settle()

    def expire(self, key):
        self.cast_together()
        # Its ruling may be here and not told yet.
        if key in self.calls:
            self.lane.expire(self.calls[key], float("inf"))
            self.settle()

    def take(self, rank, payload):
        try:
            self.lane.hear(rank, payload)
        except RemoteProtocolError as error:
            # Here nobody lies, so a message that is refused is a mistake of ours.
            raise LocalProtocolError(f"rank {self.rank} refuses what rank {rank} says: {error}") from error
        self.settle()

    def part(self, rank):
        self.lane.lose(rank, "gone")
        self.settle()

    def settle(self):
        for call in dict.fromkeys(self.calls.values()):
            for index, key in enumerate(call.keys):
                answer = self.answer(call, index)
                if answer is not None and self.calls.get(key) is call:
                    del self.calls[key]
                    self.tell(key, answer)

    def answer(self, call, index):
        # A caller of many votes waits for all of them; here each request goes on as soon as it can.
        if index in call.doubts:
            return call.doubts[index]
        return call.rulings.get(index) if call.left or call.rulings else call.outcome(self.rank)[index]

    def open_keys(self):
        alone = self.lane.call.keys if self.lane.call is not None else ()
        return [*self.ledger._requests, *self.ledger._whole, *alone]


class LeaderLedgerSeat(LedgerSeat):
    def hear(self, rank, payload):
        self.take(rank, payload)

    def lose(self, rank):
        self.part(rank)


class FollowerLedgerSeat(LedgerSeat):
    def hear(self, payload):
        self.take(0, payload)

    def lose(self):
        self.part(0)


class ChannelSeats:
    """Seats on the channel's ledgers; ballots are held for `hold_s` so that several travel together."""

    def __init__(self, hold_s, *, has_lane):
        self.hold_s = hold_s
        self.has_lane = has_lane
        self.lanes = []
        self.world = None
        self.batches = []
        self.kinds = set()

    def leader(self, size, *, send, tell):
        lines = {rank: self.line(lambda message, rank=rank: send(rank, message)) for rank in range(1, size)}
        return LeaderLedgerSeat(self, 0, LeaderLedger(size, lines), tell, range(1, size))

    def follower(self, rank, *, send, tell):
        ledger = FollowerLedger(rank, {0: self.line(send)}, shares_clock=False)
        return FollowerLedgerSeat(self, rank, ledger, tell, [0])

    def line(self, send):
        def send_and_note(message):
            self.kinds.add(type(decode(message)))
            send(bytes(message))

        return send_and_note


def run(seed, hold_s, *, has_lane):
    seats = ChannelSeats(hold_s, has_lane=has_lane)
    seats.world = World(seed, seats=seats)
    return seats.world.run(), seats


@pytest.mark.parametrize("has_lane", [True, False])
@pytest.mark.parametrize("hold_s", [0.0, 0.06])
def test_every_world_ends_well_on_the_channels_ledgers(hold_s, has_lane):
    runs = [run(seed, hold_s, has_lane=has_lane) for seed in range(100)]
    wrong = [report for report, _ in runs if report.wrongs]
    assert not wrong, "\n".join(map(str, wrong))
    # All kinds of message were there, and ballots travelled together exactly where they were held.
    assert {kind for _, seats in runs for kind in seats.kinds} == {Votes, Kept, Rulings}
    assert (max(size for _, seats in runs for size in seats.batches) > 2) is (hold_s > 0)
    # Calls ended in the lane, and others were handed over, exactly where there is one.
    lanes = [lane for _, seats in runs for lane in seats.lanes]
    assert (sum(lane.kept for lane in lanes) > 0) is (sum(lane.handed_over for lane in lanes) > 0) is has_lane


@pytest.mark.parametrize("has_lane", [True, False])
def test_a_world_on_the_ledgers_ends_as_it_does_on_the_steps_alone(has_lane):
    # One ballot a call, so that ledgers send as many messages as the steps and the same dice fall the same way.
    for seed in range(50):
        assert run(seed, 0.0, has_lane=has_lane)[0].endings == World(seed).run().endings


def test_a_world_of_batches_ends_with_the_lane_as_it_does_without():
    for seed in range(50):
        assert run(seed, 0.06, has_lane=True)[0].endings == run(seed, 0.06, has_lane=False)[0].endings

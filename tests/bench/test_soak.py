"""The soak: what it injects and checks, that it finds what is wrong, and a very short one with real processes."""

import json
from collections import Counter

import pytest
import torch

from omnikv.bench.__main__ import main
from omnikv.bench.soak import SoakResult, _Soak, soak_to_text
from omnikv.bench.soak_end import Batch, BatchEnd, Held, content_of, fate_of
from omnikv.bench.soak_end import _compare as compare

SEED = 7


class Received:
    def __init__(self, layers):
        self.layers = layers


def numbers_with(fate):
    return [number for number in range(500) if fate_of(SEED, number) == fate]


def noted(number, outcome, *, is_whole=True):
    result = SoakResult(seconds=1, seed=SEED)
    end = BatchEnd(outcomes={number: outcome})
    _Soak({}, "namespace", result)._note(Batch(first=number, count=1), "receiver", end, is_whole=is_whole)
    return result.unexpected


def test_requests_are_the_same_in_every_process_and_of_mixed_sizes():
    first, again = content_of(SEED, 3), content_of(SEED, 3)
    assert all(
        torch.equal(one.key.view(torch.int16), other.key.view(torch.int16))
        for one, other in zip(first, again, strict=True)
    )
    sizes = [content_of(SEED, number)[0].key.shape[0] for number in range(100)]
    assert min(sizes) < 10
    assert max(sizes) > 1000
    assert {fate_of(SEED, number) for number in range(100)} == {"sent", "failed", "aborted"}


def test_a_wrong_value_a_missing_layer_and_the_right_content_are_told_apart():
    for change, wrong in ((lambda layers: None, 0), (lambda layers: layers[2].value[-1].neg_(), 1), (list.pop, 1)):
        layers, end = content_of(SEED, 5), BatchEnd(outcomes={})
        change(layers)
        compare(Received(layers), content_of(SEED, 5), end)
        assert end.wrong == wrong
        assert end.checked_nbytes > 0


@pytest.mark.parametrize(
    ("fate", "outcome", "is_fine"),
    [
        ("sent", "received", True),
        ("sent", "told", False),
        ("sent", "ReceiveTimeout: nothing came", False),
        ("failed", "told", True),
        ("failed", "received", False),
        ("aborted", "received", True),
        ("aborted", "told", True),
        ("aborted", "WireError: damaged", False),
    ],
)
def test_every_outcome_is_held_against_what_the_seed_says(fate, outcome, is_fine):
    number = numbers_with(fate)[0]
    assert (noted(number, outcome) == []) is is_fine


def test_where_the_sender_was_killed_a_receiver_may_be_told_but_must_not_hang():
    number = numbers_with("sent")[0]
    assert noted(number, "told", is_whole=False) == []
    assert noted(number, "ReceiveTimeout: nothing came", is_whole=False) == [
        f"request {number}, sent: ReceiveTimeout: nothing came"
    ]


class Survivor:
    """An end that answers every batch well and holds one descriptor more each time."""

    name = "receiver"
    baseline = None

    def __init__(self):
        self.descriptors = 10

    def tell(self, order):
        self.order = order

    def hear(self):
        self.descriptors += 1
        numbers = range(self.order.first, self.order.first + self.order.count)
        outcome = {"sent": "received", "failed": "told", "aborted": "told"}
        return BatchEnd(outcomes={number: outcome[fate_of(SEED, number)] for number in numbers})

    def ask(self, order):
        return Held(descriptors=self.descriptors, threads=2, payloads=0)


def test_what_a_survivor_keeps_from_a_batch_is_a_leak(monkeypatch):
    monkeypatch.setattr("omnikv.bench.soak.SETTLE_S", 0.0)
    result = SoakResult(seconds=1, seed=SEED)
    soak = _Soak({"receiver": Survivor()}, "namespace", result)
    soak.run_batch()
    assert result.passed
    soak.run_batch()
    assert not result.passed
    assert "descriptors=12" in result.leaks[0]


def test_the_text_names_everything_that_was_found():
    result = SoakResult(
        seconds=60,
        seed=3,
        requests=24,
        outcomes=Counter(received=20, told=4),
        faults=Counter({"sender killed": 2}),
        checked_nbytes=1000,
        unexpected=["request 5, sent: told"],
        leaks=["/dev/shm/omnikv-x"],
    )
    text = soak_to_text(result, "the command")
    for part in ("24: 20 received, 4 told", "2: 2 sender killed", "1000, wrong payloads 0", "request 5", "omnikv-x"):
        assert part in text


def test_a_very_short_soak_finds_nothing(tmp_path, capsys):
    path = tmp_path / "soak.json"
    assert main(["soak", "--minutes", "0.08", "--seed", "2", "--json", str(path)]) == 0
    said = json.loads(path.read_text())
    assert said["passed"]
    assert said["checked_nbytes"] > 0
    assert said["requests"] >= 12
    assert "leaks                   0" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "x"])
def test_no_time_is_refused(minutes, capsys):
    with pytest.raises(SystemExit):
        main(["soak", "--minutes", minutes])
    assert "--minutes" in capsys.readouterr().err

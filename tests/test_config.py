"""Settings are resolved once; what is unknown or wrong is named."""

from __future__ import annotations

import dataclasses

import pytest

from omnikv.config import HandoffConfig, load
from omnikv.errors import ConfigError


def test_keywords_win_over_the_environment_and_it_over_defaults():
    environ = {"OMNIKV_RECEIVE_TIMEOUT_S": "5", "OMNIKV_TRANSPORT": "memory", "OMNIKV_CHECKSUM": "true", "HOME": "/"}
    config = load({"transport": "shm"}, environ)
    assert (config.transport, config.receive_timeout_s, config.checksum) == ("shm", 5, True)
    assert config.vote_timeout_s == HandoffConfig().vote_timeout_s


def test_an_unknown_setting_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown setting 'recieve_timeout_s'; known settings: admission_timeout_s, "):
        load({"recieve_timeout_s": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"receive_timeout_s": 0}, "receive_timeout_s must be a finite number of seconds above 0, got 0"),
        ({"slice_s": float("inf")}, "slice_s must be a finite number"),
        ({"receive_timeout_s": float("nan")}, "above 0"),
        ({"vote_timeout_s": True}, "vote_timeout_s must be a finite number"),
        ({"payload_ttl_s": 0}, "payload_ttl_s must be a number of seconds above 0, got 0"),
        ({"payload_ttl_s": "5"}, "payload_ttl_s must be a number"),
        ({"admission_timeout_s": -1}, "admission_timeout_s must be a finite number of seconds, at least 0, got -1"),
        ({"transport": ""}, "name of a transport"),
        ({"options": [1]}, "options must map"),
        ({"checksum": 1}, "checksum must be true, false or unset"),
        ({"checksum": "yes"}, "checksum must be true, false or unset"),
        ({"pack_threads": 0}, "pack_threads must be 1 to 16, or unset, got 0"),
        ({"pack_threads": True}, "pack_threads must be 1 to 16"),
        ({"pack_threads": 17}, "pack_threads must be 1 to 16"),
        ({"pack_threads": 2.0}, "pack_threads must be 1 to 16"),
    ],
)
def test_a_value_that_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        load(values)


def test_an_unreadable_environment_value_is_named():
    with pytest.raises(ConfigError, match="OMNIKV_RECEIVE_TIMEOUT_S='soon'"):
        load(environ={"OMNIKV_RECEIVE_TIMEOUT_S": "soon"})


def test_a_configuration_is_frozen_and_has_a_fingerprint():
    config = load({"options": {"b": 1, "a": 2}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.transport = "memory"
    assert config.fingerprint() == load({"options": {"a": 2, "b": 1}}).fingerprint()
    assert config.fingerprint() != load({"options": {"a": 2}}).fingerprint()


def test_none_overrides_nothing():
    config = HandoffConfig(transport="memory")
    assert config.with_overrides(transport=None, checksum=False) == HandoffConfig(transport="memory", checksum=False)


def test_equal_configurations_have_one_fingerprint_however_they_were_written():
    written = load({"receive_timeout_s": 5, "options": {"pool_nbytes": 1, "poison": True}})
    read = load({"options": {"poison": True, "pool_nbytes": 1}}, {"OMNIKV_RECEIVE_TIMEOUT_S": "5.0"})
    assert written == read
    assert written.fingerprint() == read.fingerprint()


def test_the_facts_of_two_configurations_differ_where_the_settings_do():
    one, other = load({"slice_s": 1.0, "options": {"b": 1, "a": 2}}), load({"options": {"a": 2, "b": 1}})
    different = [name for name, text in one.facts().items() if other.facts()[name] != text]
    assert different == ["slice_s"]


def test_where_a_rank_is_and_whom_it_meets_by_which_secret_is_compared_with_nobody():
    def config_of(rank):
        return HandoffConfig(
            transport="tcp",
            options={
                "lanes": 2,
                "listen": f"10.0.0.{rank}:5600",
                "peers": {rank: f"10.0.1.{rank}:5600"},
                "secret": lambda: f"secret-of-{rank}",
                "secret_file": f"/etc/rank-{rank}",
                "tls": {"certificate": f"{rank}.pem", "key": f"{rank}.key", "authority": "ca.pem"},
            },
        )

    assert config_of(0).facts() == config_of(1).facts()
    assert config_of(0).fingerprint() != load({"transport": "tcp", "options": {"lanes": 3}}).fingerprint()
    assert config_of(0).facts()["options"] == '{"lanes": 2}'


def test_no_option_is_ever_shown():
    secret = "0123456789abcdef"
    assert secret not in repr(HandoffConfig(options={"secret": secret}))
    for wrong in (lambda: load({"options": secret}), lambda: load(environ={"OMNIKV_OPTIONS": f'{{"secret": {secret}'})):
        with pytest.raises(ConfigError) as caught:
            wrong()
        assert secret not in str(caught.value)
        assert caught.value.__cause__ is None

"""Encrypted connections by the standard library: both ends show a certificate, and both check the other's."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnikv.errors import ConfigError

_SETTINGS = ("certificate", "key", "authority", "check_host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How this end encrypts: its own `certificate` and `key`, and the `authority` that it trusts, all PEM files.

    Whoever holds a certificate of that authority is let in, so it must be one that signs nobody but the ranks.
    `check_host` demands besides that a source's certificate names the host under which it was called.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authority: str | os.PathLike[str]
    check_host: bool = True

    def accepting(self) -> ssl.SSLContext:
        """The settings of a side that is called.

        Raises:
            ConfigError: a file is missing or is not what it should be.
        """
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def calling(self) -> ssl.SSLContext:
        """The settings of a side that calls.

        Raises:
            ConfigError: a file is missing or is not what it should be.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.check_host
        return self._load(context)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"tls: certificate {self.certificate}, key {self.key} and authority {self.authority} cannot be used: "
                f"{error}; give three PEM files that belong together"
            ) from error
        return context


def as_tls(setting: Tls | Mapping[str, Any] | None) -> Tls | None:
    """The setting `tls` of a transport, given as such or as a mapping from a configuration file.

    Raises:
        ConfigError: a key is missing or unknown.
    """
    if setting is None or isinstance(setting, Tls):
        return setting
    if not isinstance(setting, Mapping):
        raise ConfigError(f"tls must be a Tls or a mapping with {', '.join(_SETTINGS)}, got a {type(setting).__name__}")
    unknown = sorted(set(setting) - set(_SETTINGS))
    missing = sorted(set(_SETTINGS[:3]) - set(setting))
    if unknown or missing:
        raise ConfigError(
            f"tls needs the keys certificate, key and authority and takes check_host: missing {missing}, "
            f"unknown {unknown}"
        )
    return Tls(**setting)

"""Decides to which episode and seat a request belongs, by its path, and whether it may be served.

    /e/KEY/SEAT/v1/chat/completions     the base URL of OpenAI's clients ends with /v1
    /e/KEY/SEAT/v1/messages             Anthropic's clients append /v1/messages to theirs
    /e/KEY/v1/chat/completions          one URL for all seats: the body's `model` names the seat

The key is 128 random bits, new for each episode and attempt. A client's API key is the same key: another one is
refused, so a leaked URL alone mixes nothing. Keys are compared in constant time.
"""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flexmarl.gateway.dialects.base import Refused

LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorAddress:
    """The place that a path names."""

    key: str
    seat: str = ""
    """Empty: the body's `model` names it."""
    endpoint: str = ""
    """The part behind `v1/`, e.g. `chat/completions`."""


def address_of(path: str) -> DoorAddress | None:
    """The address that a path names, or None.

    >>> address_of("/e/5f1c/solver/v1/messages")
    DoorAddress(key='5f1c', seat='solver', endpoint='messages')
    """
    parts = [part for part in path.split("/") if part]
    if len(parts) < 4 or parts[0] != "e":
        return None
    if parts[2] == "v1":
        return DoorAddress(key=parts[1], endpoint="/".join(parts[3:]))
    if len(parts) > 4 and parts[3] == "v1":
        return DoorAddress(key=parts[1], seat=parts[2], endpoint="/".join(parts[4:]))
    return None


def seat_of(address: DoorAddress, model: str, seats: Collection[str], models: Mapping[str, str]) -> str:
    """The seat that a request speaks for. `models` maps foreign names to seats. Raises Refused with 404.

    A path without a seat takes `model` as the seat's name; of a single seat, any name.
    """
    named = address.seat or models.get(model, model)
    if named in seats:
        return named
    if not address.seat and len(seats) == 1:
        return next(iter(seats))
    raise Refused(
        f"there is no seat {named!r}; there are: {', '.join(seats)}; map other names with gateway.models",
        status=404,
        code="model_not_found",
    )


def check_caller(key: str, headers: Mapping[str, str], *, hosts: Collection[str] = ()) -> None:
    """Raises Refused for a request of a browser, of another host's name, or with another episode's key.

    `headers` have lower-case names. `hosts`: further host names under which the gateway is reached.
    """
    check_origin(headers, hosts=hosts)
    if not same_secret(key_of(headers), key):
        raise Refused("the API key is of another episode than the address", status=403, code="wrong_key")


def check_origin(headers: Mapping[str, str], *, hosts: Collection[str] = ()) -> None:
    """Raises Refused for a request of a browser, or of another host's name. Arguments as those of `check_caller`."""
    host = headers.get("host", "")
    name, _, _ = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    if host and name not in LOCAL and name not in hosts:
        raise Refused(f"the host {host[:80]!r} is not this gateway's; use 127.0.0.1", status=421, code="wrong_host")
    if headers.get("origin") or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Refused("requests of web pages are not served", status=403, code="origin")


def key_of(headers: Mapping[str, str]) -> str:
    """The key that a request brings. Raises Refused with 401 if it brings none."""
    given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()
    if not given:
        raise Refused("send the episode's key as API key", status=401, code="no_key")
    return given


def same_secret(given: str, key: str) -> bool:
    """True if both are the same key, and none is empty. It takes the same time for every wrong one."""
    return bool(key) and secrets.compare_digest(given.encode(), key.encode())

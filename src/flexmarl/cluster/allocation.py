"""Decides which training place a process group gets: never a leased one, and its old place if that is free.

A place is the devices of one whole process group, so a lease gives all of them or none (FlexMARL, section 6).
"""

from dataclasses import dataclass

from flexmarl.records import PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A place that `holder` holds, and why it got this one."""

    place: int
    holder: PolicyName
    because: str


class Places:
    """The ledger of training places, numbered from 0.

    >>> places = Places(1)
    >>> places.lease("solver").because
    'nobody has been there'
    >>> places.lease("verifier") is None
    True
    """

    def __init__(self, number: int) -> None:
        self._leases: dict[PolicyName, Lease] = {}
        self._free = list(range(number))
        """Places that nobody has used come first, then the others, the one released longest ago first."""
        self._last: dict[int, PolicyName] = {}

    @property
    def free(self) -> int:
        """Number of places that nobody holds."""
        return len(self._free)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases that are held now."""
        return tuple(self._leases.values())

    def of(self, holder: PolicyName) -> Lease:
        """The lease of a policy that holds a place."""
        return self._leases[holder]

    def lease(self, holder: PolicyName) -> Lease | None:
        """Leases a place to a policy that holds none. Its last place is the first choice. None if no place is free."""
        assert holder not in self._leases, f"policy '{holder}' holds place {self._leases[holder].place} already"
        if not self._free:
            return None
        old = next((place for place in self._free if self._last.get(place) == holder), None)
        place = self._free[0] if old is None else old
        self._free.remove(place)
        self._leases[holder] = Lease(place=place, holder=holder, because=self._reason(place, holder))
        return self._leases[holder]

    def release(self, holder: PolicyName) -> None:
        """Ends a policy's lease, so that its place is free."""
        place = self._leases.pop(holder).place
        self._last[place] = holder
        self._free.append(place)

    def _reason(self, place: int, holder: PolicyName) -> str:
        last = self._last.get(place)
        if last is None:
            return "nobody has been there"
        return "it was there last" if last == holder else f"'{last}' left it first"

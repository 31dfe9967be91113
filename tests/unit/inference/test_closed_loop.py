"""The rules against queues that answer back: what they move away is missing where they took it."""

import random
from collections import deque
from dataclasses import dataclass, field

from flexmarl.inference.scaling import BalanceRule, Demand, DrainTime, PolicyLoad, QueueGap, Stay
from flexmarl.records import PolicyName

A, B, C = PolicyName("a"), PolicyName("b"), PolicyName("c")
MOVE_S, SLOTS = 3, 2


@dataclass
class Loop:
    """Requests of 4 to 8 seconds that go from policy to policy for ever, in ticks of a second.

    An instance serves two at a time, each a token a second. One that moves drops what it runs, which waits again, and
    stands still for three seconds. The rule looks every second, as soon as no move is under way.
    """

    rule: BalanceRule
    shares: tuple[float, float, float]
    requests: int = 40
    instances: dict[str, PolicyName] = field(default_factory=lambda: {f"i{n}": (A, B, C)[n % 3] for n in range(9)})
    moves: list[tuple[int, str]] = field(default_factory=list)
    """When, and which instance."""
    served: int = 0

    def __post_init__(self) -> None:
        self.now, self.rng, self.demand = 0, random.Random(0), Demand()
        self.waiting: dict[PolicyName, deque[int]] = {policy: deque() for policy in (A, B, C)}
        self.running: dict[str, list[list[int]]] = {name: [] for name in self.instances}
        self.standing: dict[str, int] = {}
        for _ in range(self.requests):
            self.ask()

    def ask(self) -> None:
        self.waiting[self.rng.choices((A, B, C), self.shares)[0]].append(self.rng.randint(4, 8))

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.standing = {name: left - 1 for name, left in self.standing.items() if left > 1}
            for name, policy in self.instances.items():
                self.serve(name, policy)
            if not self.standing:
                self.look()

    def serve(self, name: str, policy: PolicyName) -> None:
        if name in self.standing:
            return
        running = self.running[name]
        while len(running) < SLOTS and self.waiting[policy]:
            running.append([self.waiting[policy].popleft(), 0])
        for request in running:
            request[1] += 1
        for tokens, _ in (ended := [request for request in running if request[1] == request[0]]):
            self.demand.answered(policy, tokens=tokens, serving_s=tokens)
            self.served += 1
            self.ask()
        self.running[name] = [request for request in running if request not in ended]

    def look(self) -> None:
        loads = {
            policy: PolicyLoad(
                instances={name: len(self.running[name]) for name, of in self.instances.items() if of == policy},
                waiting=len(self.waiting[policy]),
                slots=SLOTS,
                expected=self.demand.expected(policy),
            )
            for policy in (A, B, C)
        }
        for move in self.rule.decide(loads, move_s=MOVE_S):
            self.waiting[self.instances[move.instance]].extend(tokens for tokens, _ in self.running[move.instance])
            self.running[move.instance] = []
            self.instances[move.instance] = move.to
            self.standing[move.instance] = MOVE_S
            self.moves.append((self.now, move.instance))
            assert set(self.instances.values()) == {A, B, C}, "every policy keeps an instance"


def looped(rule: BalanceRule, seconds: int = 600) -> Loop:
    loop = Loop(rule, shares=(0.7, 0.2, 0.1))
    loop.run(seconds)
    return loop


def test_the_literal_rule_thrashes_and_serves_less_than_one_instance_at_a_time() -> None:
    literal, fitted = looped(QueueGap(gap=3, literal=True)), looped(QueueGap(gap=3))
    assert len(literal.moves) > 1.5 * len(fitted.moves)
    assert literal.served < fitted.served


def test_drain_time_moves_least_and_serves_most() -> None:
    ours, fitted, still = looped(DrainTime()), looped(QueueGap(gap=3)), looped(Stay())
    assert len(ours.moves) < len(fitted.moves)
    assert ours.served > fitted.served
    assert ours.served > still.served


def test_drain_time_does_little_harm_where_nothing_is_to_be_won() -> None:
    """Queues that are balanced but for chance, with every slot in use: each move costs service."""

    def balanced(rule: BalanceRule) -> Loop:
        loop = Loop(rule, shares=(1.0, 1.0, 1.0), requests=18)
        loop.run(600)
        return loop

    ours, fitted, still = balanced(DrainTime()), balanced(QueueGap(gap=3)), balanced(Stay())
    assert len(ours.moves) < len(fitted.moves)
    assert ours.served > fitted.served
    assert ours.served > 0.98 * still.served

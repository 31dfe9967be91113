"""Which conversations keep their keys and values, and who holds which block."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as law
from hypothesis import strategies as st

from flexmarl.inference.kv_ledger import STRIDE, Kept, KeptPrefixes, KvLedger, longest, prefix_keys


def ids(*values):
    return np.array(values, np.int32)


def kept_of(*values, blocks=()):
    return Kept(ids(*values), blocks)


def test_a_conversation_finds_its_longest_common_prefix():
    kept = KeptPrefixes(2)
    assert kept.keep("a", kept_of(1, 2, 3, 4, blocks=(10,))) is None
    found = kept.find("a", ids(1, 2, 9, 9))
    assert found is not None
    assert (found[0].blocks, found[1]) == ((10,), 2)


def test_the_last_prompt_token_is_always_computed_anew():
    kept = KeptPrefixes(1)
    kept.keep("a", kept_of(1, 2, 3))
    found = kept.find("a", ids(1, 2, 3))
    assert found is not None
    assert found[1] == 2


def test_others_find_nothing():
    kept = KeptPrefixes(1)
    kept.keep("a", kept_of(1, 2, 3))
    assert kept.find("b", ids(1, 2, 3)) is None
    assert kept.find(None, ids(1, 2, 3)) is None
    assert kept.find("a", ids(7, 2, 3)) is None


def test_the_next_turn_takes_the_place_of_the_last():
    kept = KeptPrefixes(1)
    first = kept_of(1, 2, 3, blocks=(4,))
    kept.keep("a", first)
    assert kept.keep("a", kept_of(1, 2, 3, 4, 5, blocks=(4, 5))) is first
    assert len(kept) == 1


def test_the_longest_unused_conversation_makes_room():
    kept = KeptPrefixes(2)
    kept.keep("a", kept_of(1, 2))
    kept.keep("b", kept_of(1, 2, blocks=(7,)))
    assert kept.find("a", ids(1, 2, 3)) is not None
    gone = kept.keep("c", kept_of(1, 2))
    assert gone is not None
    assert gone.blocks == (7,)
    assert kept.find("b", ids(1, 2, 3)) is None
    assert kept.find("a", ids(1, 2, 3)) is not None


def test_new_weights_clear_everything():
    kept = KeptPrefixes(2)
    kept.keep("a", kept_of(1, 2, blocks=(3,)))
    assert [old.blocks for old in kept.clear()] == [(3,)]
    assert kept.find("a", ids(1, 2)) is None
    assert len(kept) == 0
    assert kept.drop() is None


def test_without_a_limit_above_zero_nothing_is_kept():
    kept, new = KeptPrefixes(0), kept_of(1)
    assert kept.keep("a", new) is new
    assert len(kept) == 0


class Plain:
    """A plain model of memory: what each block holds, token by token, and who believes to hold which tokens."""

    def __init__(self, number: int, size: int, limit: int, *, lending: bool) -> None:
        self.size, self.number = size, number
        self.kept = KeptPrefixes(limit)
        self.ledger = KvLedger(number, size, self.kept, first=2)
        self.memory: dict[int, list[int]] = {block: [-1] * size for block in range(2, 2 + number)}
        self.running: list[tuple[str | None, list[int], list[int]]] = []
        self.waiting: list[tuple[str | None, list[int]]] = []
        self.preempted = self.forked = self.copied = self.lent = 0
        self.lending = lending

    def write(self, blocks: list[int], position: int, token: int) -> None:
        block = blocks[position // self.size]
        assert self.ledger._holders[block] == 1, "nobody writes to a block that another holds"
        self.memory[block][position % self.size] = token

    def start(self) -> bool:
        """Grants the first that waits its blocks, if there are enough."""
        conversation, tokens = self.waiting[0]
        keys = prefix_keys(ids(*tokens)) if self.lending else {}
        covered = self.ledger.covered(conversation, ids(*tokens), keys)
        grant = self.ledger.grant(conversation, ids(*tokens), len(tokens), keys, spare=len(self.running))
        if grant is None:
            return False
        assert grant.reused == covered
        self.waiting.pop(0)
        if grant.copy is not None:
            source, target = grant.copy
            self.memory[target] = list(self.memory[source])
            self.copied += 1
        self.forked += grant.reused >= self.size
        self.lent += conversation is None and grant.reused > 0
        for position in range(grant.reused, len(tokens)):
            self.write(grant.blocks, position, tokens[position])
        self.ledger.share(keys, tuple(grant.blocks))
        self.running.append((conversation, tokens, grant.blocks))
        return True

    def append(self, which: int, token: int) -> None:
        """A request gets a token. If there is no block for it, the youngest goes back into the line."""
        _, tokens, blocks = chosen = self.running[which % len(self.running)]
        while chosen in self.running and len(tokens) == len(blocks) * self.size:
            if not self.ledger.grow(blocks):
                conversation, held, gone = self.running.pop()
                self.ledger.release(gone)
                self.waiting.insert(0, (conversation, held))
                self.preempted += 1
        if chosen in self.running:
            self.write(blocks, len(tokens), token)
            tokens.append(token)

    def end(self, which: int, keep: bool) -> None:
        conversation, tokens, blocks = self.running.pop(which % len(self.running))
        if keep and conversation is not None:
            self.ledger.keep(conversation, ids(*tokens), blocks)
        else:
            self.ledger.release(blocks)

    def check(self) -> None:
        kept = list(self.kept._kept.values())
        tables = [(tokens, blocks) for _, tokens, blocks in self.running] + [(one.ids, one.blocks) for one in kept]
        for tokens, blocks in tables:
            read = [token for block in blocks for token in self.memory[block]]
            assert read[: len(tokens)] == list(tokens), "each reads what it wrote"
        holders = Counter(block for _, blocks in tables for block in blocks)
        assert holders == self.ledger._holders, "each block's holders are those who have it"
        assert sorted(holders) == self.ledger.held()
        free = set(self.ledger._free)
        assert len(free) == self.ledger.free == self.number - len(holders), "no block is lost"
        assert not free & holders.keys()
        assert self.ledger.top <= 2 + self.number, "the budget is never exceeded"
        assert set(self.ledger._ends) <= holders.keys(), "nothing is shared of a block that is free"
        assert set(self.ledger._shared) <= {key for keys in self.ledger._ends.values() for key in keys}


moves = st.tuples(
    st.sampled_from(["ask", "ask", "append", "append", "append", "append", "end", "abort", "swap"]), st.integers(0, 99)
)


@law(max_examples=300, deadline=None)
@given(st.lists(moves, max_size=60), st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_in_any_schedule_no_block_is_lost_or_written_by_two_and_each_reads_what_it_wrote(
    plan, number, size, limit, lending
):
    play(plan, number, size, limit, lending=lending)


def play(plan, number, size, limit, *, lending=False) -> Plain:
    """Requests come, grow, fork conversations, end, are aborted and preempted, and weights are swapped."""
    world = Plain(number, size, limit, lending=lending)
    for kind, value in plan:
        if kind == "ask":
            # Prompts begin alike, so that they share; a tenth of them differ from the first token.
            tokens = [value // 90, *range(1, 1 + value % 7 * 3)]
            if len(tokens) <= number * size:
                world.waiting.append((("a", "b", None)[value % 3], tokens))
        elif kind == "swap":
            world.ledger.forget()
        elif world.running and kind == "append":
            if len(world.running[value % len(world.running)][1]) < number * size:
                world.append(value, 1 + value % 7)
        elif world.running:
            world.end(value, keep=kind == "end")
        while world.waiting and world.start():
            pass
        world.check()
    while world.running or world.waiting:
        assert world.running or world.start(), "what fits alone is served when nobody else is left"
        if world.running:
            world.end(0, keep=False)
        world.check()
    world.ledger.forget()
    assert world.ledger.free == number
    return world


def test_random_schedules_preempt_fork_and_copy():
    """The witness of the law above."""
    rng = np.random.default_rng(0)
    kinds = ["ask", "ask", *["append"] * 5, "end"]
    plans = [[(kinds[rng.integers(8)], int(rng.integers(100))) for _ in range(60)] for _ in range(30)]
    worlds = [play(plan, 10, 3, 3, lending=True) for plan in plans]
    assert sum(world.preempted for world in worlds) > 10
    assert sum(world.forked for world in worlds) > 10
    assert sum(world.copied for world in worlds) > 10
    assert sum(world.lent for world in worlds) > 10


def test_two_calls_of_a_conversation_share_its_full_blocks_and_copy_the_last():
    ledger = KvLedger(8, 4, KeptPrefixes(2))
    first = ledger.grant("c", ids(*range(10)), 10, {})
    assert first is not None
    assert (first.blocks, first.reused, first.copy) == ([0, 1, 2], 0, None)
    ledger.keep("c", ids(*range(10)), first.blocks)
    one, two = (ledger.grant("c", ids(*range(10), last), 11, {}) for last in (50, 60))
    assert one is not None
    assert two is not None
    assert (one.blocks, one.reused, one.copy) == ([0, 1, 3], 10, (2, 3))
    assert (two.blocks, two.reused, two.copy) == ([0, 1, 4], 10, (2, 4))
    assert [ledger._holders[block] == 1 for block in (0, 1, 3, 4)] == [False, False, True, True]


def test_kept_conversations_give_way_to_requests_the_one_unused_longest_first():
    ledger = KvLedger(4, 1, KeptPrefixes(4))
    for name in "ab":
        grant = ledger.grant(name, ids(1), 1, {})
        assert grant is not None
        ledger.keep(name, ids(1), grant.blocks)
    assert ledger.covered("a", ids(1, 2), {}) == 1, "which uses it"
    assert ledger.grant(None, ids(1, 2, 3), 3, {}) is not None
    assert (ledger.covered("a", ids(1, 2), {}), ledger.covered("b", ids(1, 2), {})) == (1, 0)
    assert ledger.grant(None, ids(1, 2), 2, {}) is None
    assert ledger.free == 1


def test_prompts_share_prefixes_of_whole_strides_and_equal_ones_all_but_the_last_token():
    prompt = ids(*range(3 * STRIDE + 3))
    keys = prefix_keys(prompt)
    assert list(keys.values()) == [STRIDE, 2 * STRIDE, 3 * STRIDE, len(prompt) - 1]
    others = {
        "equal": (prompt, len(prompt) - 1),
        "another last token": (ids(*prompt[:-1], 99), len(prompt) - 1),
        "longer": (ids(*prompt, 5, 6), 3 * STRIDE),
        "parts within a stride": (ids(*prompt[:STRIDE], 99, *prompt[STRIDE + 1 :]), STRIDE),
        "apart from the first token": (ids(99, *prompt[1:]), 0),
    }
    found = {name: longest(prefix_keys(other), keys)[1] for name, (other, _) in others.items()}
    assert found == {name: length for name, (_, length) in others.items()}


@pytest.mark.parametrize("gone", [0, 1])
def test_a_prompt_is_shared_until_the_last_of_those_who_hold_it_is_gone(gone: int):
    ledger, prompt = KvLedger(16, 4, KeptPrefixes(0)), ids(*range(11))
    keys, held = prefix_keys(prompt), []
    for reused in (0, 10):
        grant = ledger.grant(None, prompt, 12, keys)
        assert grant is not None
        assert grant.reused == reused
        ledger.share(keys, tuple(grant.blocks))
        held.append(grant.blocks)
    assert held[0][2] != held[1][2], "the second has copied the block in which the prompt ends"
    ledger.release(held[gone])
    assert ledger.covered(None, prompt, keys) == 10
    ledger.release(held[1 - gone])
    assert ledger.covered(None, prompt, keys) == 0
    assert ledger.free == 16

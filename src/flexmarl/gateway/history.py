"""Decides of which tokens the prompt of a request is made, and which earlier turn it continues.

A program sends its whole history with every request. Messages are compared by what they say: role, text without the
white space around it, calls with sorted arguments; without ids, names and thoughts. The key of a history is a hash of
its seat, its tools and its messages:

    loose_0 = H(seat)      loose_i = H(loose_(i-1), message i)      key_i = H(seat, tools) loose_i
    a turn stands under both keys of its prompt with its reply

    a reply of ours is found    the prompt begins with the ids of that turn, exactly as they were sampled, and only what
                                follows is written by the template
    none is found               the whole history is written by the template

Each request becomes a turn of its own with the ids that its engine got, so training is exact in both cases. `parent` is
always a fact about ids: this prompt begins with the prompt and the response of that turn.
"""

import hashlib
import json
from bisect import bisect_left, insort_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from flexmarl.agents.chat import holds_thought
from flexmarl.agents.extension import Extension, Message
from flexmarl.gateway.dialects.base import OfferedTool, Said
from flexmarl.gateway.reply_parts import as_messages
from flexmarl.records import IntArray, SampleId
from flexmarl.tools.syntax import Syntax

Continuity = Literal["root", "extends", "rendered"]
"""root: no reply is in the history; extends: the prompt begins with an earlier turn; rendered: it does not."""
Thoughts = Literal["as_template", "keep"]
"""as_template: a prompt is rendered anew where the chat template would leave out the thoughts of earlier replies."""


class Writer(Protocol):
    """The part of a ChatRenderer that histories use."""

    extension: Extension

    def render(self, messages: Sequence[Message], *, trust_special: bool = False) -> IntArray:
        """See ChatRenderer.render."""
        ...

    def extend(
        self,
        prompt_ids: IntArray,
        response_ids: IntArray,
        *answers: Message,
        thinking: bool = False,
        trust_special: bool = False,
    ) -> IntArray | None:
        """See ChatRenderer.extend."""
        ...

    def bridge(
        self,
        before: Sequence[Message],
        prompt_ids: IntArray,
        response_ids: IntArray,
        answers: Sequence[Message],
        *,
        trust_special: bool = False,
    ) -> IntArray | None:
        """See ChatRenderer.bridge."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeliveredTurn:
    """A turn whose reply was delivered."""

    sample_id: SampleId
    prompt_ids: IntArray
    response_ids: IntArray
    thread: int
    issued: frozenset[str] = frozenset()
    """Names that the client got with it: ids of its calls, its signature."""
    thought: str = ""
    thinking: bool = False
    """True if its response holds a thought, or its prompt those of earlier responses."""
    stopped: bool = False
    """True if it ended at a text of the client's, which its ids hold and the client never saw."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """A prompt, and why it is made so."""

    ids: IntArray
    """[P] the ids that the engine gets."""
    offer: bytes
    """A hash of the seat and its tools."""
    loose_key: bytes
    """The history's key without the tools."""
    parent: DeliveredTurn | None = None
    continuity: Continuity = "root"
    why: str = ""
    """Why it was rendered anew."""
    thread: int = 0
    """Number of the conversation that it belongs to."""
    lane: int = 0
    """Number of its class: one for each system prompt, set of tools and session of the client."""
    ambiguous: bool = False
    """True if several turns said the same, and the last one was taken."""
    retokenised: int = 0
    """Sampled or given ids of the turn it follows, which came back as others."""
    thinking: bool = False


class SeatHistory:
    """The turns of one seat in one episode."""

    def __init__(self, seat: str, *, thoughts: Thoughts = "as_template", trust_special: bool = False) -> None:
        self._seat, self._thoughts, self._trust = seat, thoughts, trust_special
        self._by_key: defaultdict[bytes, list[DeliveredTurn]] = defaultdict(list)
        self._loose: set[bytes] = set()
        self._replies: set[bytes] = set()
        self._turns: list[tuple[int, DeliveredTurn]] = []
        """With their lengths, by which they are sorted; of two that are equally long, the earlier one is last."""
        self._lanes: dict[tuple[object, ...], int] = {}
        self._threads = 0

    def plan(
        self,
        writer: Writer,
        messages: Sequence[Said],
        tools: Sequence[OfferedTool] = (),
        *,
        syntax: Syntax | None = None,
        system: str = "",
        session: str = "",
    ) -> PromptPlan:
        """Makes the prompt of a request. Raises ConfigError if the template cannot render its roles.

        `system`: a role prompt before that of the request. `syntax`: how the agent writes calls. `session`: the
        client's own name for what it does now.
        """
        offer = _digest(self._seat, *(_tool_text(tool) for tool in sorted(tools, key=_name)))
        loose = chain(_digest(self._seat), map(canon, messages))
        lane = self._lane(messages, tools, session)
        told = [Said(role="system", text=system), *messages] if system else [*messages]
        shift = len(told) - len(messages)
        found, place, ambiguous = self._found(messages, offer, loose)
        why = self._why_not(found, messages, place, loose)
        ids = None
        if found is not None and not why:
            answers = as_messages(told[place + shift + 1 :], syntax)
            ids, why = self._continued(writer, found, told[: place + shift], answers, syntax)
        parent: DeliveredTurn | None = found if ids is not None else None
        if ids is None:
            ids = writer.render(as_messages(told, syntax), trust_special=self._trust)
            parent = self._begun_by(ids)
        has_replies = any(message.role == "assistant" for message in messages)
        thread = parent.thread if parent else found.thread if found else self._new_thread()
        replies = (one for one in messages if one.role == "assistant")
        thinking = any(holds_thought(f"{one.thought}{one.text}" if one.thought else one.text) for one in replies)
        return PromptPlan(
            ids=ids,
            offer=offer,
            loose_key=loose[-1],
            parent=parent,
            continuity="extends" if parent else "rendered" if has_replies else "root",
            why=why if has_replies and not (parent and parent is found) else "",
            thread=thread,
            lane=lane,
            ambiguous=ambiguous and parent is found,
            retokenised=0 if found is None or parent is found else found.length - _common(ids, found),
            thinking=thinking or (parent is not None and parent.thinking),
        )

    def plan_of(self, ids: IntArray, *, session: str = "") -> PromptPlan:
        """Makes a prompt of the client's own ids: it continues the turn that it begins with, if there is one."""
        parent = self._begun_by(ids)
        return PromptPlan(
            ids=ids,
            offer=_digest(self._seat, "ids"),
            loose_key=_digest(self._seat, ids.tobytes()),
            parent=parent,
            continuity="extends" if parent else "root",
            thread=parent.thread if parent else self._new_thread(),
            lane=self._lanes.setdefault(("ids", session), len(self._lanes)),
            thinking=parent is not None and parent.thinking,
        )

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A block whose plans number no lane and no thread."""
        lanes, threads = dict(self._lanes), self._threads
        try:
            yield
        finally:
            self._lanes, self._threads = lanes, threads

    def spoke(self, plan: PromptPlan, reply: Said, spoken: DeliveredTurn) -> None:
        """Adds a turn whose reply the client has got. `reply`: as it was delivered."""
        said = canon(reply)
        loose = chain(plan.loose_key, [said])[-1]
        self._by_key[_key(plan.offer, loose)].append(spoken)
        self._loose.add(loose)
        self._replies.add(said)
        insort_left(self._turns, (spoken.length, spoken), key=_length)

    def _found(
        self, messages: Sequence[Said], offer: bytes, loose: Sequence[bytes]
    ) -> tuple[DeliveredTurn | None, int, bool]:
        """The turn that wrote the last reply that is known, that reply's place, and whether several fit."""
        for place in range(len(messages) - 1, -1, -1):
            message = messages[place]
            if message.role != "assistant" or not (hits := self._by_key.get(_key(offer, loose[place + 1]))):
                continue
            names = {message.issued, *(call.call_id for call in message.calls)} - {""}
            named = [hit for hit in hits if hit.issued & names]
            return (named or hits)[-1], place, len(hits) > 1 and not named
        return None, -1, False

    def _why_not(
        self, found: DeliveredTurn | None, messages: Sequence[Said], place: int, loose: Sequence[bytes]
    ) -> str:
        """Why the turn's ids cannot be continued; empty if they can."""
        later = [index for index in range(place + 1, len(messages)) if messages[index].role == "assistant"]
        if later:
            if any(loose[index + 1] in self._loose for index in later):
                return "tools changed"
            known = all(canon(messages[index]) in self._replies for index in later)
            return "history rewritten" if known else "foreign reply"
        if found is None:
            return ""
        if found.stopped:
            return "stop text"
        thought = messages[place].thought
        if thought is not None and thought.strip() and thought.strip() != found.thought.strip():
            return "thought altered"
        return "" if place + 1 < len(messages) else "nothing follows the reply"

    def _continued(
        self,
        writer: Writer,
        found: DeliveredTurn,
        before: Sequence[Said],
        answers: Sequence[Message],
        syntax: Syntax | None,
    ) -> tuple[IntArray | None, str]:
        """The prompt that continues a turn; or None and why the template does not allow it."""
        thinking = found.thinking and self._thoughts == "as_template"
        role = answers[0].role
        if thinking and writer.extension.why_not(role, thinking=True):
            return None, "thought stripped"
        prompt, response = found.prompt_ids, found.response_ids
        if len(answers) == 1 or all(answer.role == "tool" for answer in answers):
            ids = writer.extend(prompt, response, *answers, thinking=thinking, trust_special=self._trust)
            if ids is not None:
                return ids, ""
        ids = writer.bridge(as_messages(before, syntax), prompt, response, answers, trust_special=self._trust)
        return (None, "template rewrites") if ids is None else (ids, "")

    def _begun_by(self, ids: IntArray) -> DeliveredTurn | None:
        """The longest turn with whose prompt and response these ids begin."""
        shorter = bisect_left(self._turns, len(ids), key=_length)
        return next((turn for _, turn in reversed(self._turns[:shorter]) if _begins(ids, turn)), None)

    def _lane(self, messages: Sequence[Said], tools: Sequence[OfferedTool], session: str) -> int:
        system = "\n".join(message.text.strip() for message in messages if message.role == "system")
        return self._lanes.setdefault((system, *sorted(map(_name, tools)), session), len(self._lanes))

    def _new_thread(self) -> int:
        self._threads += 1
        return self._threads - 1


def canon(message: Said) -> bytes:
    """The message as histories are compared.

    >>> from flexmarl.agents.chat import SaidCall
    >>> a = Said(role="assistant", text="ok ", calls=(SaidCall("f", '{"b": 1, "a": 2}', "x"),))
    >>> b = Said(role="assistant", text=" ok", calls=(SaidCall("f", '{"a":2,"b":1}', "y"),), thought="hm")
    >>> canon(a) == canon(b)
    True
    """
    calls = json.dumps([[call.name, _sorted(call.arguments)] for call in message.calls]) if message.calls else ""
    # Neither a role nor JSON has the character 0, so that two messages never share a form.
    return f"{message.role}\0{calls}\0{message.text.strip()}".encode(errors="surrogatepass")


def chain(first: bytes, said: Iterable[bytes]) -> list[bytes]:
    """The loose keys of a history of messages in their forms: of nothing, of the first message, of the first two, ...

    `first` has as many bytes as every key, so that none is mistaken for the beginning of a message.
    """
    keys = [first]
    for message in said:  # A hundred messages in every request: one call for each.
        keys.append(hashlib.sha256(keys[-1] + message).digest())
    return keys


def _key(offer: bytes, loose: bytes) -> bytes:
    return offer + loose


def _sorted(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


def _digest(*parts: bytes | str) -> bytes:
    digest = hashlib.sha256()  # Many processors have instructions for it.
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _tool_text(tool: OfferedTool) -> str:
    parameters: Mapping[str, object] = tool.parameters
    return json.dumps([tool.name, tool.description, parameters], sort_keys=True, default=str)


def _name(tool: OfferedTool) -> str:
    return tool.name


def _length(item: tuple[int, DeliveredTurn]) -> int:
    return item[0]


def _begins(ids: IntArray, turn: DeliveredTurn) -> bool:
    """True if longer ids begin with those of a turn. Its response is compared first: it is short, and most differ."""
    place = len(turn.prompt_ids)
    response = ids[place : turn.length]
    return np.array_equal(response, turn.response_ids) and np.array_equal(ids[:place], turn.prompt_ids)


def _common(ids: IntArray, turn: DeliveredTurn) -> int:
    """Number of ids that a prompt and a turn begin with alike."""
    history = np.concatenate((turn.prompt_ids, turn.response_ids))[: len(ids)]
    differs = np.flatnonzero(history != ids[: len(history)])
    return int(differs[0]) if len(differs) else len(history)

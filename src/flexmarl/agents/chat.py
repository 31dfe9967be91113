"""Chat prompts on a Hugging Face tokenizer, token by token.

ChatRenderer makes prompt ids. Conversation holds one agent's messages and the exact ids of its last call.

A prompt that continues a conversation is never tokenised again. It is three runs of ids, end to end:

    previous prompt | sampled response | suffix: end of turn, new message, generation prompt
    as it was sent  | as it was sampled| the only part that is tokenised now

`extension.py` checks at start-up for which messages the chat template would write the same; for the others the prompt
is rendered anew. In both cases, control tokens that a message spells stay text: `control_tokens.py`.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flexmarl.agents.control_tokens import ControlTokens
from flexmarl.agents.extension import QUESTION, Extension, Message, Role, SaidCall, Template, check_extension
from flexmarl.errors import ConfigError
from flexmarl.records import IntArray, SampleId, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST_TWINS = 256
"""Most renderers with other options that a renderer keeps: programs at a gateway bring tools of their own."""
CACHED_TEXTS = 4096
"""Rendered prompts, and suffixes, that a renderer caches. The samples of a group share theirs."""


RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "conversation"})
"""Arguments of `apply_chat_template` that are set here."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one call."""

    ids: IntArray
    """[P] the exact ids that the engine gets."""
    parent: SampleId | None = None
    """The turn whose prompt and response these ids begin with; None for a prompt that was rendered anew."""
    branch: int = 0
    """Number of the conversation that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How one agent's prompts differ from those that the chat template makes of messages alone."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Specifications of tools that the template writes into the prompt."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the template, e.g. {"enable_thinking": False}."""
    native: bool = False
    """True: the agent writes calls as the template does, so the template writes those of the history."""


class ChatRenderer:
    """Makes prompt ids with one tokenizer. Has a cache alone; agents of a policy with the same options share it."""

    stands_in = False
    """True if it takes the place of another tokenizer, whose template may take other options."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, end_ids: Collection[int] = ()) -> None:
        """`end_ids`: further ids that end a response, such as those of the model's generation config."""
        self._tokenizer = tokenizer
        self._end_ids = tuple(end_ids)
        self._name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer {self._name!r} has no chat template; set `tokenizer.chat_template` and save it"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"the tokenizer {self._name!r} has no `tokenizers` backend; save it as tokenizer.json first"
            )
        self._base = self
        self._twins: dict[str, ChatRenderer] = {}
        """Renderers on this tokenizer by their other options. To make one, the template is tried a hundred times."""
        self._control: frozenset[str] | None = None
        self._set_options(ChatOptions())

    def _set_options(self, options: ChatOptions) -> None:
        """Sets all that depends on the options."""
        tokenizer = self._tokenizer
        self.options = options
        tools = {"tools": [*options.tools]} if options.tools else {}

        def render(messages: list[dict[str, Any]], generate: bool) -> str:
            made = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generate, **tools, **options.arguments
            )
            return str(made)

        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        self._special_ids = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._template = Template(render, self._name, special=special, native=options.native)
        example = self._template.example()
        # Some templates mark the speaker by tokens that are not flagged as special, such as DeepSeek's `<｜User｜>`.
        control = frozenset(special | {token.content for token in added if token.content in example})
        if control != self._control:
            backend: Any = tokenizer.backend_tokenizer
            self._control, self._tokens = control, ControlTokens(backend, control, name=self._name)
        if spelled := self._tokens.spelled(json.dumps(options.tools, ensure_ascii=False)):
            raise ConfigError(
                f"tools: a description or schema spells the control token {spelled!r} of the tokenizer {self._name!r}, "
                f"which would forge a message; reword it"
            )
        self.extension: Extension = check_extension(self._template, self.encode, special)
        """Says which messages may extend a conversation, and why the others may not."""
        self.opens_thought = thought_opened(self._template.text([QUESTION]))
        """True if every prompt ends with the beginning of a thought."""
        eos: Any = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(
            sorted(self.extension.end_ids.union(self._end_ids, [] if eos is None else [eos]))
        )
        """The ids on which sampling must stop: those that end a turn in the template, the tokenizer's end token, and
        those of the model's generation config."""
        if not self.stop_ids:
            raise ConfigError(f"the tokenizer {self._name!r} has no end token; set its `eos_token`")
        self._prompt = lru_cache(CACHED_TEXTS)(self._render)
        self._suffix = lru_cache(CACHED_TEXTS)(self._render_suffix)

    def with_options(self, options: ChatOptions) -> "ChatRenderer":
        """A renderer on the same tokenizer with other options. Raises ConfigError for options that it cannot have."""
        if options == self.options:
            return self
        if made := self._twins.get(repr(options)):  # Not by equality: a template writes True and 1 differently.
            return made
        for name in () if self.stands_in else options.arguments:
            if name in RESERVED:
                raise ConfigError(f"chat_template_kwargs.{name}: this argument of the template is set by the agent")
            if re.search(rf"\b{re.escape(name)}\b", self.template_text) is None:
                raise ConfigError(
                    f"chat_template_kwargs.{name}: the chat template of {self._name!r} does not use it; remove it"
                )
        twin = object.__new__(type(self))  # `copy` would make the renderer anew, as pickling does.
        vars(twin).update(vars(self))
        twin._set_options(options)
        self._twins[repr(options)] = twin
        if len(self._twins) > MOST_TWINS:
            del self._twins[next(iter(self._twins))]
        return twin

    @property
    def template_text(self) -> str:
        """The chat template, or all of them if the tokenizer has several by name."""
        template: Any = self._tokenizer.chat_template
        return template if isinstance(template, str) else "\n".join(template.values())

    def tells(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """True if the chat template writes these tools into the prompt."""
        asked = [{"role": "user", "content": QUESTION.content}]

        def text(**arguments: Any) -> str:
            return str(self._tokenizer.apply_chat_template(asked, tokenize=False, **arguments))

        try:
            told = text(tools=[*tools])
        except Exception:  # A template is a program and may raise anything.
            return False
        return told != text() and all(tool["function"]["name"] in told for tool in tools)

    def written(self, call: SaidCall) -> str:
        """Text in which the chat template writes a call, with the end of turn; empty if it writes none."""
        return self._template.written(call)

    def special_ids(self, texts: Collection[str]) -> frozenset[int]:
        """Ids of those of the texts that are special tokens."""
        return frozenset(self._special_ids[text] for text in texts if text in self._special_ids)

    def __reduce__(self) -> "tuple[Any, ...]":
        """Pickles tokenizer and options; another process makes the renderer anew, and shares what is equal."""
        if self._base is self:
            return _received, (self._tokenizer, self._end_ids)
        return ChatRenderer.with_options, (self._base, self.options)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the vocabulary, control tokens included."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Control tokens written in it become their ids; none is added."""
        return self._tokens.encode(text)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text, as part of a message: control tokens written in it stay text."""
        return self._encoded(lambda said: said[0].content, [Message("user", text)], False).tolist()

    def decode(self, ids: Sequence[int] | IntArray, kept: frozenset[int] = frozenset()) -> str:
        """Text of ids without special tokens, except those `kept`."""
        return self._tokens.decode(ids.tolist() if isinstance(ids, np.ndarray) else ids, kept)

    def decode_all(self, ids: IntArray) -> str:
        """Text of ids with all special tokens."""
        return self._tokens.decode(ids.tolist(), frozenset(ids.tolist()))

    def without_open_bytes(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids without the bytes at their end: more of them may change the characters that these are."""
        end = len(ids)
        while end and ids[end - 1] in self._tokens.byte_ids:
            end -= 1
        return ids[:end]

    def render(self, messages: Sequence[Message], *, trust_special: bool = False) -> IntArray:
        """[P] prompt of a conversation, rendered anew, with the generation prompt. The array is read-only.

        A control token that the contents spell stays text, unless `trust_special`.
        """
        return self._prompt(tuple(messages), trust_special)

    def extend(
        self,
        prompt_ids: IntArray,
        response_ids: IntArray,
        *answers: Message,
        thinking: bool = False,
        trust_special: bool = False,
    ) -> IntArray | None:
        """[P'] previous prompt + sampled response + suffix; None if the template would write something else.

        `answers`: a message, or the results of all calls in the response. `thinking`: some response of the conversation
        holds a thought (see `holds_thought`), which many templates strip.
        """
        if self.extension.why_not(answers[0].role, thinking=thinking):
            return None
        return self._joined(prompt_ids, response_ids, self._suffix(answers, trust_special))

    def bridge(
        self,
        before: Sequence[Message],
        prompt_ids: IntArray,
        response_ids: IntArray,
        answers: Sequence[Message],
        *,
        trust_special: bool = False,
    ) -> IntArray | None:
        """[P'] as `extend`, for any answers: the template is run on this very conversation, with a placeholder as the
        response. None if it then writes the messages `before` in another way.

        `before`: the messages that `prompt_ids` were made of, as they are told now.
        """
        place = len(before)

        def behind(messages: Sequence[Message]) -> str:
            return self._template.behind(messages[:place], messages[place:])

        suffix = self._encoded(behind, [*before, *answers], trust_special)
        return self._joined(prompt_ids, response_ids, suffix) if len(suffix) else None

    def _joined(self, prompt_ids: IntArray, response_ids: IntArray, suffix: IntArray) -> IntArray | None:
        """Prompt, response and suffix, with the token that ends the response once; None if it ended with another."""
        last = int(response_ids[-1]) if len(response_ids) else None
        if last == suffix[0]:
            suffix = suffix[1:]
        elif last in self.stop_ids:  # The template would write another end token.
            return None
        return np.concatenate((prompt_ids, response_ids, suffix))

    def results_in(self, text: str, names: Sequence[str]) -> tuple[str, ...]:
        """The results of calls of these tools in `text`, by which a prompt extends another. Empty if the template wrote
        them in a way that cannot be told from here."""
        marks = [f"zqx{index}{'x' * 40}" for index in range(len(names))]  # Longer than what a template may pad.
        answers = [Message("tool", mark, name=name) for mark, name in zip(marks, names, strict=True)]
        written = self._template.suffix(*answers)
        before, *between = re.split("|".join(marks), written)
        if len(between) != len(names):
            return ()
        pattern = "".join(f"(.*?){re.escape(part)}" for part in between)
        begun = next((place for place in range(len(before) + 1) if text.startswith(before[place:])), 0)
        found = re.fullmatch(pattern, text[len(before) - begun :], re.DOTALL)
        return tuple(result.strip() for result in found.groups()) if found else ()

    def _render(self, messages: tuple[Message, ...], trust_special: bool) -> IntArray:
        return self._encoded(self._template.text, messages, trust_special)

    def _render_suffix(self, answers: tuple[Message, ...], trust_special: bool) -> IntArray:
        return self._encoded(lambda messages: self._template.suffix(*messages), answers, trust_special)

    def _encoded(
        self, render: Callable[[Sequence[Message]], str], messages: Sequence[Message], trust_special: bool
    ) -> IntArray:
        shown: Mapping[int, str] = {}
        if not trust_special:
            texts: list[str] = []
            for message in messages:
                _replaced(message, lambda text: texts.append(text) or text)
            hidden, shown = self._tokens.hide(texts)
            if shown:
                left = iter(hidden)
                messages = [_replaced(message, lambda _: next(left)) for message in messages]
        ids = np.asarray(self._tokens.encode(render(messages), shown), dtype=np.int32)
        ids.flags.writeable = False
        return ids


def _received(tokenizer: "PreTrainedTokenizerBase", end_ids: Sequence[int]) -> ChatRenderer:
    return ChatRenderer(tokenizer, end_ids=end_ids)


def _replaced(message: Message, replace: Callable[[str], str]) -> Message:
    """A message in which all texts are replaced, in a fixed order; those of its calls included."""
    content, name = replace(message.content), replace(message.name) if message.name else message.name
    if not message.calls:
        same = content is message.content and name is message.name
        return message if same else message._replace(content=content, name=name)
    calls = tuple(
        SaidCall(
            replace(call.name),
            json.dumps(_replaced_json(json.loads(call.arguments), replace)) if call.arguments else "",
            call.call_id,
        )
        for call in message.calls
    )
    return message._replace(content=content, name=name, calls=calls, prose=replace(message.prose))


def _replaced_json(value: Any, replace: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, dict):
        return {replace(key): _replaced_json(one, replace) for key, one in value.items()}
    return [_replaced_json(one, replace) for one in value] if isinstance(value, list) else value


def holds_thought(text: str) -> bool:
    """True if a response holds a thought in the form that chat templates know and may strip from the history."""
    return "</think>" in text


def thought_opened(end: str) -> bool:
    """True if a prompt with this end, special tokens included, has begun a thought.

    >>> thought_opened("<|assistant|><think> "), thought_opened("<think><|end|><|assistant|>")
    (True, False)
    """
    _, mark, rest = end.rpartition("<think>")
    return bool(mark) and not rest.strip()


def spoken_from(text: str, *, opened: bool = False) -> int:
    """Place behind the last thought of a response. A thought that has not ended has no place behind it.

    `opened`: the prompt has begun a thought.

    >>> text = "<think>hm</think>yes"
    >>> text[spoken_from(text):], spoken_from("<think>hm"), spoken_from("hm", opened=True)
    ('yes', 9, 2)
    """
    _, closed, rest = text.rpartition("</think>")
    begun = "<think>" in rest or (opened and not closed)
    return len(text) if begun else len(text) - len(rest) if closed else 0


def results_in(messages: Sequence[Message]) -> int:
    """Number of results of calls in the messages."""
    return sum(message.role == "tool" for message in messages)


__all__ = ["ChatOptions", "ChatRenderer", "Message", "Prompt", "Role", "SaidCall", "holds_thought", "results_in"]
__all__ += ["spoken_from", "thought_opened"]


_NO_IDS: IntArray = np.zeros(0, dtype=np.int32)


class Conversation:
    """One agent's conversation. It holds the prompt of the next call and the turn that this prompt extends."""

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        next_branch: Callable[[], int],
        *,
        trust_special: bool = False,
        forgotten_results: int = 0,
    ) -> None:
        """`next_branch` gives the number of a new branch. `trust_special`: messages may spell control tokens.

        `forgotten_results`: results of calls that the messages no longer hold.
        """
        self.messages = [*messages]
        self.prompt_ids = _NO_IDS
        """[P] prompt of the next call."""
        self.parent: SampleId | None = None
        """The turn whose prompt and response the next prompt extends; None for a prompt that was rendered anew."""
        self.branch = -1
        """Number of the branch. A prompt that is rendered anew starts a new one; -1 before the first prompt."""
        self._renderer, self._next_branch, self._trust_special = renderer, next_branch, trust_special
        self._last: Turn | None = None
        self._forgotten_results = forgotten_results
        self._thinking = any(message.role == "assistant" and holds_thought(message.content) for message in messages)

    def copy(self, next_branch: Callable[[], int]) -> "Conversation":
        """A copy that grows independently and takes the numbers of its branches from `next_branch`."""
        twin = copy(self)
        twin.messages, twin._next_branch = [*self.messages], next_branch
        return twin

    def receive(self, *answers: Message) -> None:
        """Adds a message of someone else, or the results of the agent's calls, and sets `prompt_ids` and `parent` for
        the agent's next call. A message may follow the results.

        Where the prompt is rendered anew, `parent` is None and a new `branch` begins. Raises ConfigError, and adds
        nothing, if the template cannot render these roles.
        """
        extended = self._extended(answers)
        if self._last is not None and extended is not None:
            self.prompt_ids, self.parent = extended, self._last.sample_id
        else:
            self.prompt_ids, self.parent = self._rendered([*self.messages, *answers]), None
            self.branch = self._next_branch()
        self.messages.extend(answers)

    def length_with(self, *answers: Message) -> int:
        """Tokens of the next prompt, if it is these messages that come."""
        extended = self._extended(answers)
        return len(self._rendered([*self.messages, *answers]) if extended is None else extended)

    def _rendered(self, messages: Sequence[Message]) -> IntArray:
        return self._renderer.render(messages, trust_special=self._trust_special)

    def _extended(self, answers: Sequence[Message]) -> IntArray | None:
        """The last prompt and response with what the answers add; None if the prompt must be rendered anew."""
        last, trust = self._last, self._trust_special
        if last is None:
            return None
        ids = (last.prompt_ids, last.response_ids)
        if answers[0].role != answers[-1].role:  # No shape that was tried at start-up.
            return self._renderer.bridge(self.messages[:-1], *ids, answers, trust_special=trust)
        return self._renderer.extend(*ids, *answers, thinking=self._thinking, trust_special=trust)

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Goes on from other messages: the next prompt is rendered anew."""
        self._forgotten_results = self.num_results - results_in(messages)
        self.messages, self._last = [*messages], None
        self._thinking = any(message.role == "assistant" and holds_thought(message.content) for message in messages)

    def answer(self, turn: Turn) -> None:
        """Adds the turn of the agent's call. Until `receive` or `end_message`, the next call continues the message."""
        self._last = turn
        self.parent = turn.sample_id
        self.prompt_ids = np.concatenate((turn.prompt_ids, turn.response_ids))

    @property
    def prompt(self) -> Prompt:
        """The prompt of the next call."""
        return Prompt(self.prompt_ids, self.parent, self.branch)

    @property
    def num_results(self) -> int:
        """Number of results of calls in the conversation, those included that its messages no longer hold."""
        return self._forgotten_results + results_in(self.messages)

    def end_message(self, text: str, calls: tuple[SaidCall, ...] = (), prose: str = "") -> None:
        """Adds `text`, the agent's message, which its last calls have completed. `prose`: its text before `calls`."""
        self.messages.append(Message("assistant", text, calls=calls, prose=prose))
        self._thinking = self._thinking or holds_thought(text)

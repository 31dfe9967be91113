import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.agents.chat import ChatRenderer, Message
from flexmarl.agents.extension import Template
from flexmarl.errors import ConfigError
from tests.unit.agents import tokenizers_for_tests as samples

MAKERS = {"characters": samples.characters, "byte_pairs": samples.byte_pairs}
TOKENIZERS = {
    (maker, template): MAKERS[maker](template)
    for maker in MAKERS
    for template in (samples.CHATML, samples.TERSE, samples.TRIMS_AND_ALTERNATES, samples.NEXT_SPEAKER_ENDS)
}
ALWAYS = {(role, thought) for role in ("user", "tool") for thought in (False, True)}


def template_text(tokenizer, messages):
    dicts = [message._asdict() for message in messages]
    return tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True)


def template_ids(tokenizer, messages):
    dicts = [message._asdict() for message in messages]
    return tokenizer.apply_chat_template(dicts, tokenize=True, add_generation_prompt=True, return_dict=False)


def sampled(ids):
    return np.asarray(ids, dtype=np.int32)


texts = st.text(st.sampled_from("ab 1+\n\t.éß中"), max_size=8)
words = st.text(st.sampled_from("ab1+.é中"), min_size=1, max_size=6)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("template", [samples.CHATML, samples.TERSE])
@given(
    system=st.none() | texts,
    question=texts,
    rounds=st.lists(st.tuples(texts, st.booleans(), st.sampled_from(["user", "tool"]), texts), max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_a_conversation_that_grows_has_the_ids_of_one_that_is_rendered_anew(maker, template, system, question, rounds):
    renderer, tokenizer = samples.with_renderer(TOKENIZERS[maker, template])
    messages = [*([Message("system", system)] if system is not None else []), Message("user", question)]
    prompt = renderer.render(messages)
    canonical = True
    for said, ended, role, content in rounds:
        ids = renderer.encode(said)
        response = sampled(ids + [tokenizer.eos_token_id] * ended)
        extended = renderer.extend(prompt, response, Message(role, content))
        assert extended is not None
        assert extended[: len(prompt) + len(response)].tolist() == [*prompt.tolist(), *response.tolist()]
        # Alone and behind the generation prompt a response has the same ids, unless a merge crosses its start.
        before = template_text(tokenizer, messages)
        canonical = canonical and renderer.encode(before + said) == renderer.encode(before) + ids
        messages += [Message("assistant", said), Message(role, content)]
        prompt = extended
    if maker == "byte_pairs":
        assert tokenizer.decode(prompt.tolist()) == template_text(tokenizer, messages)
    else:
        assert canonical, "characters never merge"
    if canonical:
        assert prompt.tolist() == template_ids(tokenizer, messages)


@pytest.mark.parametrize("maker", MAKERS)
@given(question=words, said=words, observation=words)
@settings(max_examples=30, deadline=None)
def test_a_template_without_system_and_tool_roles_says_their_words_as_the_user(maker, question, said, observation):
    key = maker, samples.TRIMS_AND_ALTERNATES
    renderer, tokenizer = samples.with_renderer(TOKENIZERS[key])
    assert renderer.extension.summary == "every prompt extends the one before"
    prompt = renderer.render([Message("system", "solve"), Message("user", question)])
    assert prompt.tolist() == template_ids(tokenizer, [Message("user", f"solve\n\n{question}")])
    response = sampled(renderer.encode(said))
    extended = renderer.extend(prompt, response, Message("tool", observation))
    suffix = renderer.encode(f"<|im_end|>\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n")
    assert extended is not None
    assert extended.tolist() == [*prompt.tolist(), *response.tolist(), *suffix]


def test_every_special_token_that_may_end_a_turn_stops_sampling():
    renderer, tokenizer = samples.with_renderer(TOKENIZERS["characters", samples.NEXT_SPEAKER_ENDS])
    user, tool, eos = tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>", "<|im_end|>"])
    assert renderer.stop_ids == tuple(sorted((user, tool, eos)))
    prompt, said = renderer.render([Message("user", "hi")]), renderer.encode("ok")

    def next_prompt(ending, role):
        extended = renderer.extend(prompt, sampled([*said, *ending]), Message(role, "x"))
        return None if extended is None else extended.tolist()

    expected = template_ids(tokenizer, [Message("user", "hi"), Message("assistant", "ok"), Message("tool", "x")])
    assert next_prompt([], "tool") == next_prompt([tool], "tool") == expected
    assert next_prompt([user], "tool") is None, "the template would not write <|user|> before <|tool|>"
    assert next_prompt([eos], "user") is None


SPLIT_OF = {
    samples.CHATML: 4,
    samples.TERSE: 4,
    samples.TRIMS_AND_ALTERNATES: 0,
    samples.FORGETS_THOUGHTS: 3,  # not (user, assistant, user): the thought of the first answer goes
    samples.LAST_TWO_ROUNDS: 4,
}


@pytest.mark.parametrize(("template", "num_split"), SPLIT_OF.items())
@given(
    contents=st.lists(
        texts | st.sampled_from(["<think>a</think>b", "zqxslot1zqx", "{0}", "\\1"]), min_size=3, max_size=3
    )
)
@settings(max_examples=30, deadline=None)
def test_a_template_that_is_filled_in_says_what_it_would_if_it_were_run(template, num_split, contents):
    tokenizer = samples.byte_pairs(template)
    split = Template(
        lambda messages, generate: tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
    )
    assert len(split._splits) == num_split
    for roles in split._splits:
        messages = [*map(Message, roles, contents)]
        assert split.text(messages) == template_text(tokenizer, messages)


def test_an_empty_response_is_extended_too():
    renderer, tokenizer = samples.with_renderer(TOKENIZERS["byte_pairs", samples.CHATML])
    messages = [Message("user", "hi"), Message("assistant", ""), Message("user", "well?")]
    extended = renderer.extend(renderer.render(messages[:1]), sampled([]), messages[2])
    assert extended is not None
    assert extended.tolist() == template_ids(tokenizer, messages)


@pytest.mark.parametrize(
    ("template", "refused", "why"),
    [
        (samples.CHATML, set(), ""),
        (samples.FORGETS_THOUGHTS, {("user", True)}, "rewrites"),
        (samples.LAST_TWO_ROUNDS, ALWAYS, "rewrites"),
        (samples.NUMBERS_ROUNDS, ALWAYS, "depends"),
        (samples.NO_END_TOKEN, ALWAYS, "special"),
    ],
)
@pytest.mark.parametrize("maker", MAKERS)
def test_templates_that_rewrite_history_are_found_out(maker, template, refused, why):
    renderer = ChatRenderer(MAKERS[maker](template))
    assert set(renderer.extension.refused) == refused
    assert all(why in reason for reason in renderer.extension.refused.values())
    prompt, response = renderer.render([Message("user", "hi")]), sampled(renderer.encode("ok"))
    for role, thinking in ALWAYS:
        extended = renderer.extend(prompt, response, Message(role, "x"), thinking=thinking)
        assert (extended is None) == ((role, thinking) in refused)


def test_an_end_token_that_eats_the_space_before_it_is_found_out():
    assert "last words" in ChatRenderer(samples.characters(lstrip=True)).extension.why_not("user")


def test_a_response_of_ids_that_no_tokenizer_would_choose_is_kept_as_sampled():
    renderer = samples.with_renderer(TOKENIZERS["byte_pairs", samples.CHATML])[0]
    odd = [token for character in "The answer is 7." for token in renderer.encode(character)]
    assert odd != renderer.encode("The answer is 7.")
    prompt = renderer.render([Message("user", "hi")])
    extended = renderer.extend(prompt, sampled(odd), Message("user", "sure?"))
    assert extended is not None
    assert extended[len(prompt) : len(prompt) + len(odd)].tolist() == odd


def test_a_rendered_prompt_cannot_be_written_to():
    prompt = samples.with_renderer(TOKENIZERS["characters", samples.CHATML])[0].render([Message("user", "hi")])
    with pytest.raises(ValueError, match="read-only"):
        prompt[0] = 0


def test_a_truncating_tokenizer_truncates_no_prompt():
    tokenizer = samples.characters()
    tokenizer.backend_tokenizer.enable_truncation(4)
    assert len(ChatRenderer(tokenizer).render([Message("user", "a long question")])) > 20


def test_a_tokenizer_without_a_chat_template_is_refused():
    tokenizer = samples.characters()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatRenderer(tokenizer)


def test_a_template_that_cannot_say_a_users_words_is_refused():
    with pytest.raises(ConfigError, match="must render the `content`"):
        ChatRenderer(samples.characters("{% for m in messages %}{{ m.role }}{% endfor %}"))


@pytest.mark.parametrize("key", [key for key in TOKENIZERS if key[1] in (samples.CHATML, samples.TERSE)])
@settings(max_examples=20, deadline=None)
@given(results=st.lists(st.text(alphabet="0123456789 ab", min_size=1, max_size=60), min_size=1, max_size=3))
def test_results_are_found_again_in_the_text_by_which_a_prompt_is_extended(key, results):
    renderer, tokenizer = samples.with_renderer(TOKENIZERS[key])
    answers = [Message("tool", result, name="calculator") for result in results]
    said = np.array(renderer.encode("calc(1)"), np.int32)
    prompt = renderer.extend(np.zeros(0, np.int32), said, *answers)
    assert prompt is not None
    text = tokenizer.decode(prompt[len(said) :], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for shown in (text, text[len(text) - len(text.lstrip()) :]):
        assert renderer.results_in(shown, ["calculator"] * len(results)) == tuple(map(str.strip, results))
    assert renderer.results_in("another text", ["calculator"]) == ()

import pytest

from flexmarl.gateway.account import Account, AccountRow
from flexmarl.gateway.addresses import address_of, check_caller, seat_of
from flexmarl.gateway.delivery import Deliveries
from flexmarl.gateway.dialects import DIALECTS
from flexmarl.gateway.dialects.base import Refused
from flexmarl.gateway.reply_parts import read_reply
from flexmarl.records import SampleId

USER = [{"role": "user", "content": "hi"}]
KEY = "5f1c"


def test_a_path_names_episode_seat_and_endpoint():
    direct, by_model = address_of("/e/5f1c/solver/v1/messages/count_tokens"), address_of("/e/5f1c/v1/responses")
    assert direct is not None
    assert by_model is not None
    assert (direct.seat, direct.endpoint) == ("solver", "messages/count_tokens")
    assert seat_of(by_model, "small", ["solver", "titler"], {"small": "titler"}) == "titler"
    with pytest.raises(Refused, match="no seat 'gpt'"):
        seat_of(by_model, "gpt", ["solver", "titler"], {})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer other"}, 403),
        ({"x-api-key": KEY, "host": "evil.example"}, 421),
        ({"x-api-key": KEY, "host": "localhost:80", "origin": "http://page"}, 403),
        ({"x-api-key": KEY, "sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_callers_without_the_key_from_pages_or_for_other_hosts_are_sent_away(headers, status):
    with pytest.raises(Refused) as refused:
        check_caller(KEY, headers)
    assert refused.value.status == status


def test_the_key_opens_the_door():
    check_caller(KEY, {"authorization": f"Bearer {KEY}", "host": "127.0.0.1:8000"})


@pytest.mark.parametrize(
    ("endpoint", "body", "named"),
    [
        ("chat/completions", {"messages": USER, "n": 10**6}, "n: "),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ("chat/completions", {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        ("chat/completions", {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ("messages", {"messages": USER, "tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search"),
        ("messages", {"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ("responses", {"input": "x", "tools": [{"type": "file_search"}]}, "file_search"),
        ("responses", {"input": [{"type": "computer_call"}]}, "computer_call"),
        ("responses", [], "JSON object"),
    ],
)
def test_what_is_not_served_is_refused_by_name(endpoint, body, named):
    with pytest.raises(Refused) as refused:
        DIALECTS[endpoint].ask(body)
    assert named in refused.value.text
    assert refused.value.status == 400


def test_unknown_fields_are_ignored_and_named():
    ask = DIALECTS["chat/completions"].ask({"messages": USER, "service_tier": "auto", "temperature": 0})
    assert (ask.ignored, ask.asked) == (("service_tier",), {"temperature": 0})


def test_each_row_of_the_table_of_deliveries():
    deliveries = Deliveries()
    first = deliveries.asked("a", retries=False)
    assert (first.how, deliveries.asked("a", retries=True).how) == ("new", "new")  # Its client is still there.
    assert deliveries.left(first.exchange)
    joined = deliveries.asked("a", retries=False)
    assert (joined.how, joined.exchange) == ("joins", first.exchange)
    deliveries.finished(first.exchange)
    deliveries.left(first.exchange, 3)
    again = deliveries.asked("a", retries=False)
    assert (again.how, again.exchange) == ("again", first.exchange)
    assert deliveries.delivered(first.exchange)
    assert not deliveries.delivered(first.exchange)
    deliveries.left(first.exchange)
    assert deliveries.asked("a", retries=True).how == "again"
    assert deliveries.asked("a", retries=False).how == "new"


def test_a_call_has_one_fate():
    account, row = Account(), AccountRow(seat="solver", tokens=3, fate="delivered")
    account.sampled[SampleId("x")] = 3
    account.add(SampleId("x"), row)
    assert account.missing == 0
    with pytest.raises(ValueError, match="two fates"):
        account.add(SampleId("x"), row)


@pytest.mark.parametrize(
    ("text", "opened", "thought", "said"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),  # The template began the thought.
        ("<think>\nhm", False, "hm", ""),
        ("hm", True, "", "hm"),  # The model does not think.
        ("yes", False, "", "yes"),
        ("a </think> is no thought", False, "", "a </think> is no thought"),
    ],
)
def test_a_thought_is_no_part_of_the_text(text, opened, thought, said):
    parts = read_reply(text, opened=opened)
    assert (parts.thought, parts.text) == (thought, said)


def test_a_prefill_is_not_said_again_and_a_stop_text_not_at_all():
    parts = read_reply("7, so it is. END of it", begun="The answer is ", hidden=14, stop=[" END"])
    assert (parts.text, parts.stopped_by) == ("7, so it is.", " END")

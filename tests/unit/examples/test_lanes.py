"""The table of what a program asked for, from episodes as `flexmarl show --json` prints them."""

import json
from typing import Any

from examples.black_box.lanes import main


def turn(agent: str, lane: int, continuity: str, prompt: int, reply: int, **more: Any) -> dict[str, Any]:
    return {
        "agent": agent,
        "tags": {"lane": lane, "continuity": continuity},
        "prompt": [
            {"ids": [7] * (prompt - 1), "text": f"<system>\nYou are the {agent}.\nMore"},
            {"ids": [7], "text": "x"},
        ],
        "reply": {"ids": [7] * reply},
        "state": "trained",
        "reason": "",
        "finish": "stop",
        **more,
    }


def test_turns_are_counted_by_lane_and_every_token_by_its_fate() -> None:
    lost = {"state": "filtered", "reason": "undelivered: 0 of 5 tokens", "finish": "abort"}
    episodes = [
        [turn("coder", 0, "root", 10, 4), turn("coder", 0, "extends", 20, 3, finish="length")],
        [turn("titler", 0, "root", 6, 5, **lost), turn("coder", 1, "rendered", 30, 2)],
    ]
    lines = list(main(json.dumps({"turns": turns}) for turns in episodes))
    assert lines[2:] == [
        "| coder | 0 | You are the coder. | 2 | 1 | 1 | 0 | 15 | 1 | 0 |",
        "| coder | 1 | You are the coder. | 1 | 0 | 0 | 1 | 30 | 0 | 0 |",
        "| titler | 0 | You are the titler. | 1 | 1 | 0 | 0 | 6 | 0 | 1 |",
        "",
        "14 tokens sampled: 9 trained, 5 undelivered",
    ]

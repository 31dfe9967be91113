"""Episodes that a command in a box plays, on a scripted model at a real gateway."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from flexmarl.agents.black_box import Command
from flexmarl.errors import EpisodeError
from flexmarl.gateway.runners.boxed_commands import CommandHost
from flexmarl.gateway.server import seats_alone, serving, unix_socket
from flexmarl.records import GenerationRequest
from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from tests.unit.agents.tokenizers_for_tests import byte_pairs
from tests.unit.gateway.doors import At, Played, TokenModel, play

tokenizer_of = cache(byte_pairs)
command_number = count().__next__


def payload_of(at: At, *, prompt: str = "3+4", files: Mapping[str, str] = {}) -> dict[str, Any]:
    """The payload of an episode on one task."""
    seats = {name: asdict(seat) for name, seat in at.door.seats.items()}
    return {"task": {"prompt": prompt, "data": {"files": files}}, "seats": seats, "episode": "g0e0a0"}


def played(
    sandbox: Bubblewrap,
    folder: Path,
    command: Command | Callable[[At], Command],
    *,
    prompt: str = "3+4",
    files: Mapping[str, str] = {},
    base: Path | None = None,
    script: Callable[[str, GenerationRequest], str] = lambda *_: "seven",
    around: Callable[[Any], Any] = lambda app: app,
    **options: Any,
) -> Played:
    """Plays one episode by a command. `notes` has its answer, or its error.

    `base`: the folder that {base} stands for; None: `folder`. `around`: wraps the gateway's application. `options`: see
    `doors.play`.
    """

    async def program(at: At) -> None:
        path = folder / f"{command_number()}.sock"
        host = CommandHost(sandbox, path, base=base or folder, outputs=folder / "commands")
        async with serving(around(seats_alone(at.sessions)), unix_socket(path)):
            at.notes["reward_key"] = at.door.rewards.key
            try:
                asked = command if isinstance(command, Command) else command(at)
                at.notes["answer"] = await host.play(asked, payload_of(at, prompt=prompt, files=files))
            except EpisodeError as error:
                at.notes["error"] = str(error)

    tokenizer = tokenizer_of()
    model = TokenModel(tokenizer, script, token_s=0.0, scramble=bool(options.pop("scramble", False)))
    return play(program, model, tokenizer, sockets=True, **options)

"""The relay inside a box: connections to 127.0.0.1 reach the Unix socket of the gateway. It imports none of ours.

    agent ──► 127.0.0.1:PORT ──► /run/relay.sock ──► gateway

It runs on one thread of the box's driver, and ends with the box.
"""

import asyncio
import os
import threading

WAY_OUT = "/run/relay.sock"


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes on what comes, up to its end."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def serve(port: int, ready: threading.Event) -> None:
    """Relays connections until the process ends."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, out = await asyncio.open_unix_connection(WAY_OUT)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, out), pump(back, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", port)
    ready.set()
    await server.serve_forever()


def begin(port: int, environment: dict) -> None:
    """Sets the environment of the box's commands, and relays on a thread of its own. Returns when it listens."""
    os.environ.update(environment)
    ready = threading.Event()
    threading.Thread(target=lambda: asyncio.run(serve(port, ready)), daemon=True).start()
    if not ready.wait(10):
        raise RuntimeError("the relay does not listen")

import asyncio
import time

from flexmarl.orchestrator.monitor import PROBE_S, measure_lag
from flexmarl.simulator.virtual_time import run_virtual


async def delays(during):
    noted = []
    probe = asyncio.create_task(measure_lag(noted.append))
    await asyncio.sleep(0)
    await during()
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    return noted


def test_what_blocks_the_loop_is_seen():
    async def block():
        time.sleep(5 * PROBE_S)  # noqa: ASYNC251
        await asyncio.sleep(PROBE_S)

    assert max(asyncio.run(delays(block))) >= 4 * PROBE_S


def test_virtual_time_has_no_lag():
    noted = run_virtual(delays(lambda: asyncio.sleep(100 * PROBE_S)))
    assert len(noted) in (99, 100)
    assert max(noted) < 1e-9

"""Health of a simulated engine, with the switches of injected faults: whether it hears a call, and takes weights."""

import asyncio

from flexmarl.errors import EngineError


class Health:
    """Well, mute until it is lost, or lost."""

    def __init__(self) -> None:
        self.gone = ""
        """Why every call raises EngineError."""
        self.refuses_load = ""
        """Why no weights can be loaded."""
        self._lost = asyncio.Event()
        self.mute = False

    async def reached(self) -> None:
        """Returns if the engine is there; a call to a mute one waits until it is lost."""
        if self.mute:
            await self._lost.wait()
        if self.gone:
            raise EngineError(self.gone)

    def check_load(self) -> None:
        """Raises EngineError where no weights can be loaded."""
        if self.refuses_load:
            raise EngineError(self.refuses_load)

    def fall_mute(self) -> None:
        """From now on it hears nothing."""
        self.mute = True

    def lose(self, because: str) -> None:
        """It is gone for good."""
        self.gone = because
        self._lost.set()

"""Objects of this process."""

import asyncio

from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.testing.object_checks import check_object_store


def test_the_inline_store_keeps_the_contract():
    asyncio.run(check_object_store(InlineObjectStore))

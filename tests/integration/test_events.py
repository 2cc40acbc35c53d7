"""Hints through the real Redis."""

import asyncio

from common.events import AsyncEvents, Event, EventSender, JobChanged, JobProgress
from common.settings import DispatcherSettings

PROGRESS = JobProgress("1", "t", 1, "denoise", 3, 10, 2.5)


async def test_what_a_worker_sends_is_heard_and_the_last_progress_is_kept(settings: DispatcherSettings) -> None:
    url = settings.redis_url.get_secret_value()
    events, sender = AsyncEvents(url), EventSender(url)
    subscribed = asyncio.Event()
    heard: list[Event] = []

    async def listen() -> None:
        async for event in events.listen(subscribed.set):
            heard.append(event)
            if len(heard) == 2:
                return

    listening = asyncio.create_task(listen())
    await asyncio.wait_for(subscribed.wait(), 10)
    sender.send(JobChanged("1", "t", 2))
    sender.send(PROGRESS)
    await asyncio.wait_for(listening, 10)
    assert heard == [JobChanged("1", "t", 2), PROGRESS]
    assert await events.last_progress(["1", "2"]) == {"1": PROGRESS}
    await asyncio.to_thread(sender.close)
    await events.close()


async def test_without_redis_sending_costs_nothing_and_reading_gives_nothing() -> None:
    events = AsyncEvents("redis://127.0.0.1:1/0")
    await events.send_many([PROGRESS])
    assert await events.last_progress(["1"]) == {}
    await events.close()

"""vLLM's scheduler, made to change weights while keys and values are on their way between two engines.

vLLM refuses to drop its caches while a connector holds blocks: those of a finished prefill that another engine has yet
to fetch, or those that a fetch writes into.  What is held here stays held, and is of the old version, as whoever
fetches it knows; but no prefix of the old version may be found any more, so the blocks lose their hashes instead.
Requests that wait for keys and values are not kept: the worker has given them up before (see ``inference.py``).
"""

from __future__ import annotations

import logging

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

__all__ = ["HoldingAsyncScheduler", "HoldingScheduler"]

logger = logging.getLogger(__name__)


class _Holding(Scheduler):
    """Drops all caches but what a connector holds, and comes to rest with it."""

    def has_finished_requests(self) -> bool:
        """As vLLM's; while it is paused, prompts that wait to be fetched are no work, or an update would wait too."""
        if self.pause_state != PauseState.UNPAUSED:
            return bool(self.finished_req_ids)
        return super().has_finished_requests()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As vLLM's, but with blocks that are held it forgets every hash and succeeds."""
        try:
            if super().reset_prefix_cache(reset_running_requests):
                return True
        except RuntimeError as error:  # the running requests are preempted by now
            logger.info("blocks are held for another engine: %s", error)
        pool = self.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block = BlockHashToBlockMap()  # type: ignore[no-untyped-call]
        pool.cached_block_hashes_by_block.clear()
        for block in pool.blocks:
            block.reset_hash()  # type: ignore[no-untyped-call]
        return True


class HoldingScheduler(_Holding):
    """For engines that schedule a step after the one before it."""


class HoldingAsyncScheduler(_Holding, AsyncScheduler):
    """For engines that schedule a step while the one before it runs."""

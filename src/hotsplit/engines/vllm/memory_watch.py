"""Whether hot rows leave what they should while vLLM starts: its own figures, and what is free, as soon as they are known.

determine_available_memory   a step has been profiled: is there a KV cache for one request?
initialize_from_config       the KV cache is made: what it takes of a GPU is a part of the reserve
compile_or_warm_up_model     graphs are captured: has the reserve been kept?
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from hotsplit.config import HotsplitConfig
from hotsplit.engines.vllm import room
from hotsplit.host.memory import memory_limits

logger = logging.getLogger(__name__)


class MemoryWatch:
    """What one worker looks at.

    Args:
        config: Settings; None where the model runs unchanged, and nothing is looked at.
        is_on_gpu: Whether hot rows lie in a GPU's memory, which is one rank's own.
        num_ranks: Ranks that share the memory of this host.
        hot_bytes: Tells the fast memory that hot rows of this rank take.
    """

    def __init__(
        self, config: HotsplitConfig | None, *, is_on_gpu: bool, num_ranks: int, hot_bytes: Callable[[], int]
    ) -> None:
        self._config, self._is_on_gpu, self._num_ranks = config, is_on_gpu, num_ranks
        self._hot_bytes = hot_bytes
        self._kv_cache_bytes = 0

    def look_at_kv_cache(self, num_bytes: int, *, vllm_config: Any) -> None:
        """A step has been profiled: say so where hot rows leave too little for the KV cache.

        Args:
            num_bytes: What vLLM has found for it.
            vllm_config: vLLM's configuration.

        Raises:
            BudgetError: Nothing is left; names the largest budget that fits.
        """
        if self._is_on_gpu:
            for notice in room.look_at_kv_cache(num_bytes, hot_bytes=self._hot_bytes(), vllm_config=vllm_config):
                logger.warning("hotsplit: %s", notice)

    @contextlib.contextmanager
    def making_kv_cache(self) -> Iterator[None]:
        """Around the allocation of the KV cache."""
        before = room.gpu_memory().free_bytes if self._is_on_gpu else 0
        yield
        if self._is_on_gpu:
            self._kv_cache_bytes = max(before - room.gpu_memory().free_bytes, 0)

    def require_reserve(self) -> None:
        """After warm-up, whether the reserve has been kept.

        Raises:
            BudgetError: It has not; names the largest budget that fits.
        """
        if self._config is None:
            return
        if self._is_on_gpu:
            available: int | None = room.gpu_memory().free_bytes + self._kv_cache_bytes
            num_ranks = 1
        else:
            available, num_ranks = memory_limits().available_bytes, self._num_ranks
        room.require_reserve(self._config, hot_bytes=self._hot_bytes(), num_ranks=num_ranks, available=available)

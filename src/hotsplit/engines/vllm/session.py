"""One worker's hotsplit, from the plan to the last saved count.

    load_model       prepare: settings -> headers -> budget -> plan -> ranges
      every layer    claim: which rows it gets
    loaded           start: banks over the rows, verified where they really lie
    execute_model    step: tick, count
    shutdown         close: save what was learned

There is one session per process, since vLLM has one worker per process; the layers find it here.

Shapes: L MoE layers of this rank, E experts, R rows.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hotsplit.bank.range_banks import RangeBankOptions, RangeBanks
from hotsplit.bank.range_rows import RangeRows
from hotsplit.bank.record import Record, RunFacts
from hotsplit.bank.rows import LayerRows
from hotsplit.engines.vllm import announce, refusals, room, tuned
from hotsplit.engines.vllm.backends import Backend, BackendOptions, open_backend
from hotsplit.engines.vllm.memory_watch import MemoryWatch
from hotsplit.engines.vllm.planning import Prepared
from hotsplit.engines.vllm.scheduled import padding_mask, phase_of
from hotsplit.engines.vllm.selector import decoder_index, is_other_stack, match_layers, require_real
from hotsplit.engines.vllm.selftest import Prover
from hotsplit.engines.vllm.teller import Teller
from hotsplit.engines.vllm.weights import Claim
from hotsplit.errors import EngineError, UnsupportedEngineError
from hotsplit.host.progress import LoadWatch
from hotsplit.metrics import MetricsSnapshot
from hotsplit.plan.planfile import Plan, plan_hash

logger = logging.getLogger(__name__)

HUGE_PAGES = True
"""Ask for huge pages behind hot rows. A module constant, not a setting: only a fair benchmark wants them off."""
TELL_EVERY_S = 5.0
"""Seconds between two looks at whether the snapshot file is out of date."""

_current: Session | None = None


def current() -> Session | None:
    """The session of this process, if its worker has begun to load."""
    return _current


def required() -> Session:
    """The session of this process.

    Raises:
        EngineError: None was prepared: a layer is built outside of a worker's load.
    """
    if _current is None:
        raise EngineError(
            "a layer of routed experts is built before its worker has planned",
            got="a model that is not loaded by vLLM's worker",
            do="unset the HOTSPLIT_ variables where models are built by hand",
        )
    return _current


def begin(prepared: Prepared | None) -> Session:
    """Make the session of this process; one that ended before gives way.

    Args:
        prepared: Plan, sizes, settings; None where the engine runs without hotsplit.

    Raises:
        EngineError: Another model is being served in this process.
    """
    global _current  # noqa: PLW0603 - one worker per process: vLLM's own layout
    if _current is not None and not _current.is_closed:
        raise EngineError(
            "a second model in one process",
            got="one that hotsplit serves already",
            do="shut the first engine down (llm.llm_engine.engine_core.shutdown()), or start another process",
        )
    _current = Session(prepared)
    return _current


class Session:
    """What one worker holds.

    Args:
        prepared: Plan, sizes, settings. Where everything fits all layers run stock, as they do without it.
    """

    def __init__(self, prepared: Prepared | None) -> None:
        self._asked = prepared
        self.layers: list[Any] = []
        """The experts modules, by layer_id, once they are built."""
        self.left_alone: list[str] = []
        """Layers of routed experts that hotsplit does not serve: draft layers, other stacks."""
        self._rows: tuple[LayerRows, ...] = ()
        self._found: list[str] = []
        self._names: dict[int, str] = {}
        self._claims: dict[str, Claim] = {}
        self._memory: RangeRows | None = None
        self._backend: Backend | None = None
        self._banks: RangeBanks | None = None
        self._record: Record | None = None
        self._teller: Teller | None = None
        self._prover = Prover()
        self._watch: LoadWatch | None = None
        self._entered = threading.local()
        self._entered.is_told = True
        self._watch_of_memory: MemoryWatch | None = None
        self._has_warned = False
        self.is_closed = False
        """Whether the worker has shut down."""

    @property
    def is_stock(self) -> bool:
        """Whether every expert fits and the model runs unchanged."""
        return self._asked is None or self._asked.is_stock

    @property
    def _prepared(self) -> Prepared:
        if self._asked is None:
            raise EngineError("the plan of this worker", got="an engine that runs without hotsplit")
        return self._asked

    @property
    def banks(self) -> RangeBanks:
        """Rows, routes, live loop."""
        if self._banks is None:
            raise EngineError("the banks of this worker", got="a model that is not loaded yet")
        return self._banks

    @property
    def plan(self) -> Plan:
        """The plan that the run started from."""
        return self._prepared.choice.plan

    def snapshot(self) -> MetricsSnapshot:
        """All metrics as they stand."""
        if self._record is None:
            raise EngineError("the metrics of this worker", got="a model that is not loaded yet")
        with self.banks.lock:
            return self._record.snapshot()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around vLLM's load: ranges before it, banks after it; a load that fails leaves nothing behind."""
        try:
            if self.is_stock:
                yield
                return
            self._open()
            total, num_layers = self._prepared.expert_bytes, len(self._prepared.stage.layers)
            with LoadWatch("experts", total_bytes=total, num_layers=num_layers) as self._watch:
                yield
            self._start()
        except BaseException:
            self.is_closed = True
            self._give_back()
            raise

    def _open(self) -> None:
        """The memory of this worker, and the rows in it."""
        prepared, config = self._prepared, self._prepared.config
        options = BackendOptions(
            bank_dir=config.bank_path,
            numa_policy=config.numa_policy,
            cold_bytes=prepared.room.cold_bytes,
            huge_pages=HUGE_PAGES,
        )
        self._backend = open_backend(prepared.place.device_type, options=options)
        if self._backend.memory.num_banks > 1:
            room.require_stages(prepared.expert_bytes, num_ranks=prepared.place.num_local)
        self._rows = prepared.rows
        self._memory = RangeRows(self._rows, memory=self._backend.memory)

    def claim(self, layer_name: str, *, moe_config: Any) -> Claim | None:
        """Which rows a layer gets; None for one that is left alone.

        Args:
            layer_name: Module path.
            moe_config: vLLM's.

        Raises:
            UnsupportedEngineError: A layer of the plan that cannot be served.
        """
        if self.is_stock:
            return None
        stage = self._prepared.stage
        index = decoder_index(layer_name)
        self._found.append(layer_name)
        if index not in stage.layers or index in self._names or is_other_stack(layer_name):
            self.left_alone.append(layer_name)
            logger.info("hotsplit: %s is left alone: no layer of the plan", layer_name)
            return None
        if self._memory is None or self._watch is None:
            raise EngineError(f"{layer_name}", got="a layer that is built outside of its model's load")
        layer_id = stage.layers.index(index)
        rows = self._rows[layer_id]
        num_shared = moe_config.num_experts - moe_config.num_logical_experts
        if moe_config.num_logical_experts != len(rows.row_map) or num_shared != rows.num_fixed:
            raise UnsupportedEngineError(
                f"{layer_name}",
                got=f"{moe_config.num_logical_experts} routed and {num_shared} fused shared experts",
                wanted=f"{len(rows.row_map)} and {rows.num_fixed}, as the plan has",
                do="switch fused shared experts off, or run this model without hotsplit",
            )
        self._names[index] = layer_name
        claim = Claim(
            layer_id=layer_id,
            name=layer_name,
            rows=rows,
            memory=self._memory,
            row_bytes=int(stage.row_bytes[layer_id]),
            watch=self._watch,
            prover=self._prover,
        )
        self._claims[layer_name] = claim
        return claim

    def route(self, topk_ids: torch.Tensor, layer_name: str) -> torch.Tensor:
        """The route op.

        Args:
            topk_ids: Expert ids, [T, K].
            layer_name: Module path.

        Returns:
            Row ids, [T, K].
        """
        is_padding = padding_mask()
        if is_padding is None and topk_ids.device.type != "cpu":
            self._warn_of_padding()
        return self.banks.route(self._claims[layer_name].layer_id, topk_ids, is_padding=is_padding)

    def _warn_of_padding(self) -> None:
        """Once: a GPU's steps are padded to the sizes of graphs."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("hotsplit: vLLM tells of no padding: tokens that nobody asked for count as traffic")

    @contextlib.contextmanager
    def step(self, scheduler_output: Any) -> Iterator[None]:
        """Around one step of the engine.

        Args:
            scheduler_output: vLLM's.

        Raises:
            BankError: The third update in a row failed.
        """
        if self.is_stock or not scheduler_output.total_num_scheduled_tokens:
            yield
            return
        self._enter_thread()
        self.banks.tick()
        with self.banks.step(phase_of(scheduler_output)):
            yield

    def _enter_thread(self) -> None:
        """An engine in its user's process runs in whichever thread calls it; a driver wants to be told."""
        if not getattr(self._entered, "is_told", False) and self._backend is not None:
            self._backend.enter_thread()
            self._entered.is_told = True  # of the thread itself: its number may be another's later

    @property
    def memory_watch(self) -> MemoryWatch:
        """Looks at what is left of fast memory while vLLM starts; at nothing where the model runs unchanged."""
        if self._watch_of_memory is None:
            prepared = None if self.is_stock else self._prepared
            self._watch_of_memory = MemoryWatch(
                None if prepared is None else prepared.config,
                is_on_gpu=prepared is not None and prepared.place.device_type == "cuda",
                num_ranks=1 if prepared is None else prepared.place.num_local,
                hot_bytes=lambda: self.banks.rows.hot_bytes,
            )
        return self._watch_of_memory

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Around a check that may refuse to start: it leaves nothing behind, so that a smaller budget can be tried."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Save what was learned, stop the copies, give memory back; twice is harmless."""
        if self.is_closed:
            return
        self.is_closed = True
        atexit.unregister(self.close)
        if self._teller is not None:
            self._teller.close()
        self._give_back()

    def adopt(self, module: Any) -> None:
        """Remember the module of a claimed layer.

        Args:
            module: vLLM's experts module.
        """
        self.layers.append(module)

    def _start(self) -> None:
        """The model is loaded: verify, then let the banks take over."""
        prepared, stage, config = self._prepared, self._prepared.stage, self._prepared.config
        match_layers(self._found, expected=stage.layers).require_all()
        self.layers.sort(key=lambda module: module.hotsplit_layer_id)
        require_real(dict(_tensors_of(self.layers)))
        refusals.require_modular(self.layers)
        if self._memory is None or self._backend is None:
            raise EngineError("the rows of this worker", got="no memory")
        options = RangeBankOptions(
            top_k=prepared.top_k,
            dynamic=config.dynamic,
            dyn_steps=config.dyn_steps,
            rebalance=prepared.rebalance,
            rank=prepared.place.rank,
            copies_ids=prepared.place.is_compiled,
        )
        prior = None if prepared.choice.prior is None else stage.rows_of(prepared.choice.prior)
        # Engines load in inference mode: counters made there could not be written to between two steps.
        with torch.inference_mode(mode=False):
            self._banks = RangeBanks(
                self._memory, layers=self._rows, prior=prior, options=options, device=self._backend.device
            )
            self._backend.warm_up(self._banks.router, prepared.top_k)
        row_bytes = [self._memory.row_bytes(layer_id) for layer_id in range(len(stage.layers))]
        sizes, notices = prepared.with_real_rows(row_bytes, hot_bytes=self._memory.hot_bytes)
        facts = RunFacts(
            sizes=sizes,
            plan_hash=plan_hash(prepared.choice.plan),
            budget_bytes=stage.budget_bytes,
            hot_bytes=self._memory.hot_bytes,
            host_bytes=self._memory.host_bytes,
            dynamic=config.dynamic,
            backend=self._backend.name,
            learn_into=config.state_path if prepared.is_learning else None,
            run_dir=prepared.place.run_dir,
            rank=prepared.place.rank,
            stage=prepared.place.stage,
        )
        self._record = Record(self._banks.router, live=self._banks.live, facts=facts)
        counts = {rows.num_rows: rows.num_rows - (rows.spare_row is not None) for rows in self._rows}
        notices += tuned.use_stock_counts(counts)
        tuned.mark_cold_weights(self.layers, memory=self._memory)
        announce.loaded(prepared, memory=self._memory, facts=facts, notices=notices, left_alone=self.left_alone)
        enter_thread = self._backend.enter_thread
        self._teller = Teller(self._record, banks=self._banks, every_s=TELL_EVERY_S, enter_thread=enter_thread)
        atexit.register(self.close)

    def _give_back(self) -> None:
        for module in self.layers:
            for parameter in vars(module).get("_parameters", {}).values():  # none where it broke off too early
                if parameter is not None:
                    # Whoever still looks at the model sees empty tensors, not memory that is gone.
                    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.layers.clear()
        if self._backend is not None and not self._has_settled(self._backend):
            return
        if self._banks is not None:
            self._banks.close()
        elif self._memory is not None:
            self._memory.close()
        if self._backend is not None:
            self._backend.close()

    @staticmethod
    def _has_settled(backend: Backend) -> bool:
        """Whether nothing that runs needs the rows any more; a device that has failed says nothing, and keeps them."""
        try:
            backend.settle()
        except RuntimeError as error:
            logger.warning("hotsplit: memory of the rows goes with the process: %s", error)
            return False
        return True


def _tensors_of(modules: Sequence[Any]) -> Iterator[tuple[str, tuple[int, str]]]:
    """Path, number of elements and device type of every weight of the experts."""
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{module.layer_name}.{name}", (parameter.numel(), parameter.device.type)

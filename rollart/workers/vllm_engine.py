"""One vLLM engine: started, asked, updated in flight, and ended.

It speaks of itself only by its own word: versions are the ones that the engine core stamped on each step's
output, log-probabilities are those of the distribution that it sampled (``processed_logprobs``), and what
can't be true is an error, never passed on.  Prompts and answers are token ids; no tokenizer is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollart.config import Inference
from rollart.config.routing import Pool
from rollart.errors import ConfigError
from rollart.packing import pack_floats, pack_ids, unpack_ids
from rollart.protocol import Generate, Generated, VersionRun
from rollart.workers.vllm_transfer import (
    REMOTE_PREFILL,
    connector_options,
    connector_variables,
    handover,
    pack_handover,
)
from rollart.workers.worker import Deterministic

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["SCRATCH_VARIABLE", "SLOWDOWN_VARIABLE", "EngineError", "VllmEngine"]

logger = logging.getLogger(__name__)

CPU_CACHE_GIB = 1.0
"""KV cache of an engine on CPU, unless the config says otherwise."""

ROUNDING = 1e-6
"""Nats by which a log-probability may exceed 0 through rounding; it is reported as 0."""
KEPT_PARAMS = 1024
"""Sampling parameters kept for requests that are alike."""
SCRATCH_VARIABLE = "ROLLART_ENGINE_SCRATCH"
"""Tells the engine's process its folder of temporary files, which it removes when its worker was killed."""
SLOWDOWN_VARIABLE = "ROLLART_ENGINE_SLOWDOWN"
"""Tells the engine's process how many times as long a step shall take, to stand for slower hardware."""
RANKS_END_S = 5.0
"""For the processes of an engine to end by themselves."""
MAX_SOCKET_PATH = 107
MAX_NAME = 40
"""Characters of the scratch folder's name, and of a socket's in it, at most."""


class EngineError(RuntimeError):
    """The engine answered with something that can't be true, or gave a request up."""


class VllmEngine:
    """An ``AsyncLLM`` whose weights come from a weight store."""

    def __init__(self, llm: AsyncLLM, scratch: Path, *, start_s: float, on_cpu: bool) -> None:
        self.start_s = start_s
        self.on_cpu = on_cpu
        self._llm = llm
        self._scratch = scratch
        self._vocabulary = int(llm.model_config.get_vocab_size())
        self._running: set[str] = set()
        self._params: dict[tuple[object, ...], SamplingParams] = {}
        from vllm.inputs.engine import tokens_input

        self._tokens_input = tokens_input

    # --- life -----------------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        model_dir: str,
        settings: Inference,
        pool: Pool,
        *,
        seed: int,
        scratch_in: Path,
        silence_s: float = 30.0,
    ) -> VllmEngine:
        """Start an engine for the model in ``model_dir``, with random weights until the first ``load``.

        Runs in a thread: the event loop goes on.  When the task is cancelled, what was started is ended.
        The engine's sockets and temporary files are in a folder made in ``scratch_in``.
        """
        started = time.perf_counter()
        scratch = _make_scratch(scratch_in)
        before = set(multiprocessing.active_children())
        thread = ThreadPoolExecutor(1, thread_name_prefix="engine-start")
        loop = asyncio.get_running_loop()
        # A list, not a result: frames of the thread outlive it, and would keep the engine's client to the exit.
        made: list[tuple[AsyncLLM, bool]] = []
        starting = loop.run_in_executor(
            thread, _start, model_dir, settings, pool, seed, scratch, silence_s, made
        )
        try:
            await asyncio.shield(starting)
        except BaseException:
            while not starting.done():
                _kill(set(multiprocessing.active_children()) - before)
                await asyncio.wait({starting}, timeout=0.2)
            if made:
                await asyncio.to_thread(made.pop()[0].shutdown, timeout=0)
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        finally:
            thread.shutdown(wait=False)
        llm, on_cpu = made.pop()
        engine = cls(llm, scratch, start_s=time.perf_counter() - started, on_cpu=on_cpu)
        if "generate" not in await llm.get_supported_tasks():
            await engine.close()
            raise ValueError(
                f"vLLM can't generate with the model in {model_dir}: does its config.json name an "
                "architecture of a causal language model?"
            )
        return engine

    async def close(self) -> None:
        """Kill the engine's process: it holds nothing that the seconds of a gentler end would save.

        One that is divided over processes is given the time to remove the memory that they share.
        """
        handler = self._llm.output_handler
        if handler is not None:  # it would take the end for a failure
            handler.cancel()
            await asyncio.wait({handler})
        logging.getLogger("vllm.v1.utils").setLevel(logging.ERROR)  # it warns of the process that it kills
        ranks = self._llm.vllm_config.parallel_config.tensor_parallel_size
        await asyncio.to_thread(self._llm.shutdown, timeout=RANKS_END_S if ranks > 1 else 0)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def death(self) -> str:
        """Why it answers no more, as far as is known; empty while it runs.

        A thread of vLLM waits for the process's end.
        """
        if not self._llm.errored:
            return ""
        manager: Any = self._llm.engine_core.resources.engine_manager
        codes = ", ".join(str(code) for code in manager.finished_procs().values())
        return f"the engine's process died (exit code {codes})" if codes else "the engine failed"

    @property
    def eos_ids(self) -> list[int]:
        """Tokens that end an answer: those of generation_config.json, else of config.json."""
        ids = self._llm.input_processor.generation_config_fields.get("eos_token_id")
        return [] if ids is None else [ids] if isinstance(ids, int) else sorted(ids)

    @property
    def live(self) -> int:
        """Requests that the engine has not finished."""
        return int(self._llm.get_num_unfinished_requests())

    # --- requests -------------------------------------------------------------------------------------

    async def generate(self, request: Generate) -> Generated:
        """Sample.  ``Deterministic`` for a request the model can't serve, ``EngineError`` for a false answer.

        Cancelling the task aborts the request in the engine.
        """
        greedy = request.temperature == 0.0
        output = await self._ask(request.request_id, unpack_ids(request.prompt), self._sampling(request))
        answer = output.outputs[0]
        if answer.finish_reason not in ("stop", "length"):
            raise EngineError(f"request {request.request_id} ended by {answer.finish_reason!r}")
        ids = list(answer.token_ids)
        return Generated(
            seq=request.seq,
            ids=pack_ids(ids),
            logprobs=b"" if greedy else pack_floats(_logprobs_of(answer, ids)),
            versions=_versions_of(answer, len(ids)),
            finish_reason=answer.finish_reason,
            cached_tokens=output.num_cached_tokens or 0,
            kv=pack_handover(output.kv_transfer_params) if request.prefill else b"",
        )

    def progress(self, request_id: str, after: int) -> tuple[bytes, bytes, list[VersionRun]] | None:
        """What a running request has sampled after its first ``after`` tokens: ids, log-probabilities (none where
        it is greedy) and versions, by the engine's own word; ``None``: nothing yet."""
        processor = self._llm.output_processor
        internal = processor.external_req_ids.get(request_id)
        state = processor.request_states.get(internal[0]) if internal else None
        if state is None or state.detokenizer is None or state.logprobs_processor is None:
            return None
        count = state.detokenizer.num_output_tokens()
        if count <= after:
            return None
        runs, position = [], 0
        for span in state._weight_version_spans() or []:
            length = span.end - max(span.start, after)
            if length > 0:
                runs.append(VersionRun(int(span.version), length))
            position = span.end
        ids = list(state.detokenizer.output_token_ids[after:])
        found: Any = state.logprobs_processor.logprobs
        if position != count or (found is not None and list(found.token_ids[after:]) != ids):
            return None
        logprobs = b"" if found is None else pack_floats(_checked(list(found.logprobs[after:])))
        return pack_ids(ids), logprobs, runs

    def knows(self, request_id: str) -> bool:
        """Whether the engine has a request of that name."""
        return request_id in self._llm.output_processor.external_req_ids

    async def release(self, packed: bytes) -> None:
        """Tell the engine that holds the keys and values at ``packed`` that nobody will fetch them."""
        await self._llm.notify_kv_transfer_request_rejected(f"release-{uuid.uuid4().hex}", handover(packed))

    async def score(self, ids: Sequence[int]) -> tuple[list[float], int]:
        """Log-probabilities of ``ids[1:]``, each given those before it (temperature 1, no mask), and the
        version that scored them.

        The prefix cache is not read for it: every token is computed.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,
            skip_reading_prefix_cache=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._ask(f"score-{uuid.uuid4().hex}", ids, params)
        found: Any = output.prompt_logprobs
        if found is None or list(found.token_ids) != list(ids[1:]):
            raise EngineError(f"the engine scored other tokens than the {len(ids)} it was asked for")
        return _checked(list(found.logprobs)), _versions_of(output.outputs[0], 1)[0].version

    async def abort_all(self) -> None:
        """Give up every request; each ends with an ``EngineError``."""
        await self._llm.abort(list(self._running))

    async def _ask(self, request_id: str, ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        """The final output of a request."""
        from vllm.exceptions import VLLMClientError

        if request_id in self._running:
            raise Deterministic(f"request id {request_id} is in use")
        # Without a tokenizer vLLM does not look, and such an id would end the engine, not the request.
        if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise Deterministic(
                f"request {request_id} has token ids from {min(ids)} to {max(ids)}; "
                f"the model knows 0 to {self._vocabulary - 1}"
            )
        self._running.add(request_id)
        final = None
        try:
            async for output in self._llm.generate(self._tokens_input(list(ids)), params, request_id):
                final = output
        except (ValueError, VLLMClientError) as error:
            raise Deterministic(f"the engine refused request {request_id}: {error}") from error
        finally:
            self._running.discard(request_id)
        if final is None:
            raise EngineError(f"request {request_id} ended without an answer")
        return final

    def _sampling(self, request: Generate) -> SamplingParams:
        """vLLM's parameters for a request.  vLLM copies them, so those without a seed are made once."""
        key = (
            request.max_tokens,
            request.temperature,
            request.allowed_token_ids,
            request.stop_token_ids,
            request.ignore_eos,
            request.seed,
        )
        if request.prefill or request.kv:
            own = _sampling_params(request)
            words = dict(REMOTE_PREFILL) if request.prefill else handover(request.kv)
            own.extra_args = {"kv_transfer_params": words}
            return own
        params = self._params.get(key)
        if params is None:
            params = _sampling_params(request)
            if request.seed is None:
                if len(self._params) >= KEPT_PARAMS:
                    self._params.clear()
                self._params[key] = params
        return params

    # --- weights --------------------------------------------------------------------------------------

    async def suspend(self) -> None:
        """Stop between two steps; requests in flight stay, and their keys and values are dropped."""
        await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def load(self, manifest: str, version: int) -> None:
        """Load a version into the suspended engine.

        After an error the model is neither the old nor the new one: the engine must not run again.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"manifest": manifest}))
        await self._llm.finish_weight_update(weight_version=str(version))

    async def resume(self) -> None:
        """Run again: what was in flight is recomputed under the weights that are loaded now."""
        await self._llm.resume_generation()


def _make_scratch(place: Path) -> Path:
    """A private folder in ``place``, or in the system's temporary folder where its sockets' paths would be
    longer than a socket's path may be."""
    fits = len(str(place.absolute())) + 2 * MAX_NAME < MAX_SOCKET_PATH
    return Path(tempfile.mkdtemp(prefix="engine-", dir=place if fits else None))


@contextlib.contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what starts meanwhile; then as before."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start(
    model_dir: str,
    settings: Inference,
    pool: Pool,
    seed: int,
    scratch: Path,
    silence_s: float,
    made: list[tuple[AsyncLLM, bool]],
) -> None:
    """In a thread: everything that imports vLLM.  Adds to ``made`` the engine, and whether it runs on CPU.

    The engine's threads aren't bound to cores: engines and a trainer share them, and vLLM would bind each
    engine to the same ones.
    """
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(pool.threads or settings.threads),
        SCRATCH_VARIABLE: str(scratch),
        SLOWDOWN_VARIABLE: str(pool.slowdown),
        "TMPDIR": str(scratch),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(scratch),
    }
    with _variables(wanted):
        from vllm.platforms import current_platform

        on_cpu = bool(current_platform.is_cpu())
        # A model that runs eagerly needs no compiler, and compiling the few helpers that vLLM compiles anyway
        # would hold up the first answer by half a minute.
        more = {"TORCH_COMPILE_DISABLE": "1"} if on_cpu else {}
        if settings.splits:
            more |= connector_variables(on_cpu=on_cpu)
        if pool.slowdown != 1 and not on_cpu:
            raise ConfigError(f"inference.pools: slowdown of {pool.hardware} does nothing on a GPU engine")
        with _variables(more):
            made.append((_start_vllm(model_dir, settings, seed, on_cpu, silence_s), on_cpu))


def _start_vllm(model_dir: str, settings: Inference, seed: int, on_cpu: bool, silence_s: float) -> AsyncLLM:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollart.workers.vllm_weights import BACKEND, StoreExecutor, StoreRanksExecutor

    options: dict[str, Any] = connector_options(on_cpu=on_cpu, silence_s=silence_s) if settings.splits else {}
    cache_gib = settings.kv_cache_gib
    if on_cpu:
        if settings.gpu_memory_utilization is not None:
            raise ConfigError(
                "inference.gpu_memory_utilization does nothing on a CPU engine; use kv_cache_gib"
            )
        cache_gib = cache_gib or CPU_CACHE_GIB
        options["enforce_eager"] = True
    elif settings.gpu_memory_utilization is not None:
        options["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(cache_gib * (1 << 30))
    arguments = AsyncEngineArgs(
        model=model_dir,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=str(settings.dtype),  # type: ignore[arg-type]  # vLLM checks it
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=seed,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        tensor_parallel_size=settings.tensor_parallel,
        distributed_executor_backend=StoreExecutor if settings.tensor_parallel == 1 else StoreRanksExecutor,
        **options,
    )
    return AsyncLLM.from_engine_args(arguments)


def _kill(processes: set[Any]) -> None:
    for process in processes:
        process.kill()


def _sampling_params(request: Generate) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        logprobs=None if request.temperature == 0.0 else 0,
        flat_logprobs=True,
        allowed_token_ids=unpack_ids(request.allowed_token_ids) or None,
        stop_token_ids=unpack_ids(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        detokenize=False,
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _logprobs_of(answer: CompletionOutput, ids: list[int]) -> list[float]:
    """The sampled tokens' log-probabilities, one per id."""
    found: Any = answer.logprobs
    if found is None or list(found.token_ids) != ids:
        raise EngineError(f"log-probabilities of other tokens than the {len(ids)} sampled")
    return _checked(found.logprobs)


def _checked(values: list[float]) -> list[float]:
    """``values`` with rounding above 0 taken off; ``EngineError`` for what is no log-probability."""
    highest = max(values, default=0.0)
    if not math.isfinite(sum(values)) or highest > ROUNDING:
        raise EngineError(f"log-probabilities that are not finite and ≤ 0, the highest {highest}")
    return values if highest <= 0.0 else [min(value, 0.0) for value in values]


def _versions_of(answer: CompletionOutput, count: int) -> list[VersionRun]:
    """Runs over the ``count`` sampled tokens, from the engine core's stamps."""
    spans = [span for span in answer.weight_versions or [] if span.end > span.start]
    position = 0
    for span in spans:
        if span.start != position:
            break
        position = span.end
    if position != count or not all(span.version.isdecimal() for span in spans):
        raise EngineError(f"weight versions {spans} for {count} tokens")
    return [VersionRun(int(span.version), span.end - span.start) for span in spans]

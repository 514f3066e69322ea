"""Running plans on a GPU: deserialise, bind, enqueue. Written from TensorRT's documentation; see docs/tensorrt.md for
what has and has not been run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trtllm_dflash.checkpoint.read import RankTensors
from trtllm_dflash.engine.linear_session import LinearSession
from trtllm_dflash.engine.network_session import NetworkRunner
from trtllm_dflash.engine.paged_session import PagedSession
from trtllm_dflash.engine.plan_build import read_plan_facts
from trtllm_dflash.engine.plan_facts import Network, PlanFacts, ProfileFacts
from trtllm_dflash.engine.plan_weights import BoundWeights
from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops.tensorrt_library import ErrorLog, TensorRTLibrary, check_backend, load_tensorrt
from trtllm_dflash.ops.tensorrt_plugin import plugin_registry

if TYPE_CHECKING:
    from trtllm_dflash.engine.directory import EngineDirectory

_TORCH_DTYPES = {
    "float": torch.float32,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}


def open_tensorrt_session(engine: EngineDirectory, device: torch.device, *, graphs: bool = True) -> EngineSession:
    """Open an engine directory with plans: a session of linear or of paged caches, as its config.json says.

    Args:
        engine: the directory. device: a CUDA device. graphs: capture passes of fixed shape as CUDA graphs.

    Raises:
        EngineError: no GPU, another TensorRT or GPU than the plans are for, or a damaged plan.
        BuildError: TensorRT is missing or another version, or does not load the plugin library.
    """
    facts = engine.tensorrt
    if facts is None:
        raise EngineError(f"{engine.path}: config.json does not say what built its plans", hint="build it again")
    if device.type != "cuda":
        raise EngineError(
            f"{engine.path}: its TensorRT plans need a CUDA GPU, and the device is {device}",
            hint="build with --backend torch to run on this machine; inspect shows what the plans hold",
        )
    library = load_tensorrt(check_backend(engine.backend))
    if facts.plugin_library is not None:
        # Plans with plugin layers name them; the registry must know them before a plan is loaded.
        plugin_registry(library.trt, str((engine.path / facts.plugin_library.file).absolute()))
    networks: tuple[Network, ...] = ("target",) if engine.drafter_config is None else ("target", "inject", "draft")
    plans = {network: read_plan_facts(engine.path, network, 0) for network in networks}
    tensors: dict[str, Mapping[str, Tensor]] = {}
    if facts.weights == "external":
        for model in ("target",) if engine.drafter_config is None else ("target", "drafter"):
            tensors[model] = RankTensors(engine.path / model / "rank0.safetensors")
    weights = BoundWeights(tensors, device)
    plan_bytes = {network: (engine.path / plan.file).read_bytes() for network, plan in plans.items()}
    plain = PlanRunner(library, plans, plan_bytes, weights, device)
    inside = sum(plan.weight_bytes for plan in plans.values()) if facts.weights == "embedded" else 0
    runner = GraphedRunner(plain) if graphs else plain
    return network_session(engine, runner, device, weight_bytes=weights.loaded_bytes + inside)


def network_session(
    engine: EngineDirectory, runner: NetworkRunner, device: torch.device, *, weight_bytes: int = 0
) -> EngineSession:
    """The session that fits the caches of ``engine``, over ``runner``, whose weights take ``weight_bytes``.

    Raises:
        EngineError: config.json does not say which.
    """
    facts = engine.tensorrt
    if facts is None:
        raise EngineError(f"{engine.path}: config.json does not say what built its plans", hint="build it again")
    configs = (engine.target_config, engine.drafter_config, engine.limits)
    dtype = getattr(torch, engine.target_config.dtype)
    if facts.cache == "paged":
        return PagedSession(*configs, runner=runner, device=device, dtype=dtype, weight_bytes=weight_bytes)
    return LinearSession(
        *configs,
        runner=runner,
        device=device,
        dtype=dtype,
        row_tokens=facts.row_tokens,
        weight_bytes=weight_bytes,
    )


def choose_profile(plan: PlanFacts, inputs: Mapping[str, Tensor]) -> int:
    """Index of the first profile that has room for ``inputs``.

    Raises:
        EngineError: none has.
    """
    for index, profile in enumerate(plan.profiles):
        if all(_within(profile, name, tensor) for name, tensor in inputs.items()):
            return index
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in inputs.items() if "_cache." not in name)
    raise EngineError(
        f"network {plan.network}: no profile has room for {shapes}",
        hint="build with larger --max-batch-size, --max-num-tokens or --max-seq-len",
    )


@dataclass
class _Context:
    """An execution context that is fixed on one profile, and the memory it works in."""

    context: Any
    scratch_bytes: int


class PlanRunner:
    """``NetworkRunner`` over IExecutionContext.

    One context per network and profile, so that none is switched; all share one scratch memory, because passes follow
    each other on one stream.

    Args:
        library: TensorRT. plans, plan_bytes: facts and contents of each plan. weights: bound once. device: CUDA.
    """

    def __init__(
        self,
        library: TensorRTLibrary,
        plans: Mapping[Network, PlanFacts],
        plan_bytes: Mapping[Network, bytes],
        weights: BoundWeights,
        device: torch.device,
    ) -> None:
        self._device = device
        self._plans = dict(plans)
        self._log = ErrorLog(library)
        self._runtime = library.trt.Runtime(self._log.logger)
        self._engines = {network: self._load(library, network, content) for network, content in plan_bytes.items()}
        self._weights = {network: weights.bind(plan.bindings) for network, plan in plans.items()}
        self._contexts = {
            network: [self._context(library, network, index) for index in range(len(plan.profiles))]
            for network, plan in plans.items()
        }
        largest = max(one.scratch_bytes for contexts in self._contexts.values() for one in contexts)
        self._scratch = torch.empty(max(largest, 1), dtype=torch.uint8, device=device)
        for contexts in self._contexts.values():
            for one in contexts:
                one.context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        # TensorRT synchronises the whole device around passes on the default stream.
        self._stream = torch.cuda.Stream(device)

    def _load(self, library: TensorRTLibrary, network: Network, content: bytes) -> Any:
        engine = self._runtime.deserialize_cuda_engine(content)
        if engine is None:
            reasons = "; ".join(self._log.take_errors()) or "no reason was logged"
            raise EngineError(
                f"{self._plans[network].file}: {library.backend} {library.version} cannot load this plan: {reasons}",
                hint="build it again on this machine, for this GPU and this TensorRT",
            )
        return engine

    def _context(self, library: TensorRTLibrary, network: Network, index: int) -> _Context:
        engine = self._engines[network]
        context = engine.create_execution_context(library.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            reasons = "; ".join(self._log.take_errors()) or "no reason was logged"
            raise EngineError(f"network {network}: no execution context: {reasons}")
        stream = torch.cuda.current_stream(self._device)
        if not context.set_optimization_profile_async(index, stream.cuda_stream):
            raise EngineError(f"network {network}: profile {index} cannot be used")
        stream.synchronize()
        for name, tensor in self._weights[network].items():
            self._address(context, name, tensor)
        return _Context(context, int(engine.get_device_memory_size_for_profile_v2(index)))

    def run(self, network: Network, inputs: Mapping[str, Tensor], *, recurring: bool = False) -> dict[str, Tensor]:
        """See ``NetworkRunner.run``. Enqueues on the current stream and returns at once."""
        plan = self._plans[network]
        context = self._contexts[network][choose_profile(plan, inputs)].context
        for name, tensor in inputs.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise EngineError(f"network {network}: input {name} of shape {tuple(tensor.shape)} was refused")
            self._address(context, name, tensor)
        outputs: dict[str, Tensor] = {}
        for output in plan.outputs:
            if "_cache_out." in output.name:
                # An updated cache is its input: both names have one address.
                outputs[output.name] = inputs[output.name.replace("_cache_out.", "_cache.")]
            else:
                shape = tuple(context.get_tensor_shape(output.name))
                outputs[output.name] = torch.empty(shape, dtype=_TORCH_DTYPES[output.dtype], device=self._device)
            self._address(context, output.name, outputs[output.name])
        self._enqueue(network, context)
        return outputs

    def _enqueue(self, network: Network, context: Any) -> None:
        current = torch.cuda.current_stream(self._device)
        on_default = current == torch.cuda.default_stream(self._device)
        stream = self._stream if on_default else current
        if on_default:
            stream.wait_stream(current)
        if not context.execute_async_v3(stream.cuda_stream):
            raise EngineError(f"network {network} failed: {'; '.join(self._log.take_errors()) or 'no reason logged'}")
        if on_default:
            current.wait_stream(stream)

    def _address(self, context: Any, name: str, tensor: Tensor) -> None:
        if not context.set_tensor_address(name, tensor.data_ptr()):
            raise EngineError(f"tensor {name}: its address was refused; the plan has no such input or output")

    def close(self) -> None:
        """Release contexts, engines, weights and scratch memory."""
        torch.cuda.synchronize(self._device)
        self._contexts.clear()
        self._engines.clear()
        self._weights.clear()
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self._device)


class GraphedRunner:
    """Captures passes of fixed shape and replays them: one launch from the host instead of TensorRT's many.

    Args:
        runner: computes and is captured.
    """

    def __init__(self, runner: PlanRunner) -> None:
        self._runner = runner
        self._graphs: dict[tuple[object, ...], _CapturedPass] = {}

    def run(self, network: Network, inputs: Mapping[str, Tensor], *, recurring: bool = False) -> Mapping[str, Tensor]:
        """See ``NetworkRunner.run``. Outputs of a captured pass are overwritten by its next run."""
        # Inside a capture of the whole cycle the pass becomes part of that graph.
        if torch.cuda.is_current_stream_capturing() or not recurring:
            return self._runner.run(network, inputs)
        key = (
            network,
            *((name, tuple(t.shape), t.data_ptr() if _is_resident(name) else 0) for name, t in inputs.items()),
        )
        if key not in self._graphs:
            self._graphs[key] = _CapturedPass(self._runner, network, inputs)
        return self._graphs[key].replay(inputs)

    def close(self) -> None:
        """Release graphs and what the runner holds."""
        self._graphs.clear()
        self._runner.close()


class _CapturedPass:
    def __init__(self, runner: PlanRunner, network: Network, inputs: Mapping[str, Tensor]) -> None:
        self._inputs = {name: t if _is_resident(name) else t.clone() for name, t in inputs.items()}
        # TensorRT allocates and loads lazily in the first pass of a shape, which a capture may not contain. Running a
        # pass twice is harmless: it writes the same cache rows with the same values.
        runner.run(network, self._inputs)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = runner.run(network, self._inputs)

    def replay(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name, tensor in inputs.items():
            if not _is_resident(name):
                self._inputs[name].copy_(tensor)
        self._graph.replay()
        return self._outputs


def _is_resident(name: str) -> bool:
    """Inputs that stay where they are from pass to pass."""
    return "_cache." in name or name.startswith("rotary_") or name == "query_extent"


def _within(profile: ProfileFacts, name: str, tensor: Tensor) -> bool:
    for one in profile.ranges:
        if one.input == name:
            return all(
                low <= dim <= high for low, dim, high in zip(one.minimum, tensor.shape, one.maximum, strict=True)
            )
    return True

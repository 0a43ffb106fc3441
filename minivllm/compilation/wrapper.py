"""Traces a model once, and runs the pieces ever after.

`torch.compile` guards every call: before it runs the compiled code it checks that nothing it relied
on has changed. The engine promises that only the number of tokens changes, so after the one trace
Dynamo is left out altogether: the split graph is called directly, with the parameters it was
traced with. That is fast, and it is a promise: a branch on the number of tokens in a model's
forward would silently keep the side it was traced on. `strict=True` keeps Dynamo and its guards on
shapes, and turns a broken promise into an error.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config

from minivllm.compilation.cache import ArtifactCache
from minivllm.compilation.compilers import Compiler, EagerCompiler, InductorCompiler
from minivllm.compilation.piecewise_backend import PiecewiseBackend
from minivllm.compilation.splitting import check_splitting_ops
from minivllm.config import EngineConfig
from minivllm.errors import ModelError
from minivllm.forward_context import ForwardContext, set_forward_context
from minivllm.layers.attention import Attention
from minivllm.models.decoder import DecoderForCausalLM
from minivllm.models.source import cache_root

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Not 0 or 1, which Dynamo takes for constants, and unlikely to be a dimension of any model.
_TRACED_TOKENS = 61


def compile_model(
    model: DecoderForCausalLM, config: EngineConfig, attention_layers: Mapping[str, Attention]
) -> Forward:
    """Compiles a model as the configuration says.

    Args:
        model: Loaded, and packed if it is going to be.
        config: Resolved.
        attention_layers: The model's, by name.

    Returns:
        What to call instead of the model; the model itself for `compile="none"`.

    Raises:
        ConfigError: A splitting operation does not exist.
        ModelError: The model cannot be traced as one graph.
    """
    options = config.compilation
    if options.compile == "none":
        return model
    check_splitting_ops(options.splitting_ops)
    cache = None
    if options.compile_cache:
        factors = {"device": config.device, "fusions": sorted(options.fusions)}
        cache = ArtifactCache(cache_root() / "compiled", factors)
    compiler = _make_compiler(model, config)
    backend = PiecewiseBackend(compiler, options.splitting_ops, options.compile_sizes, cache)
    compiled = CompiledModel(model, backend, options.strict)
    with set_forward_context(ForwardContext(None, attention_layers)):
        compiled.trace(torch.device(config.device))
    if options.compile_sizes_at_start:
        backend.compile_all_sizes()
    return compiled


def _make_compiler(model: DecoderForCausalLM, config: EngineConfig) -> Compiler:
    options = config.compilation
    if options.compile == "eager":
        return EagerCompiler()
    if not options.fusions:
        return InductorCompiler()
    from minivllm.compilation.fusion import FusionPass

    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    return InductorCompiler(FusionPass(options.fusions, model.config, dtype, device))


class CompiledModel:
    """Stands where the model's forward stood.

    Args:
        model: Loaded, and packed if it is going to be: parameters must not be replaced afterwards.
        backend: Not called yet.
        strict: Keep guards on shapes, and raise where one fails.
    """

    def __init__(self, model: nn.Module, backend: PiecewiseBackend, strict: bool = False) -> None:
        self.backend = backend
        self.strict = strict
        self._compiled = torch.compile(
            _with_own_code(model.forward),
            backend=backend,
            fullgraph=True,
            dynamic=False,  # only what is marked below is a symbol
            options={"guard_filter_fn": _only_shapes if strict else _no_guards},
        )
        self._arguments: list[Any] = []
        self._token_inputs: list[tuple[int, int]] = []
        self._size_inputs: list[int] = []

    @torch.inference_mode()
    def trace(self, device: torch.device) -> None:
        """Traces and compiles, with made-up tokens; call it inside a forward context without data.

        Raises:
            ModelError: The model's forward cannot be traced as one graph; says where.
        """
        inputs = (
            torch.zeros(_TRACED_TOKENS, dtype=torch.int32, device=device),
            torch.zeros(_TRACED_TOKENS, dtype=torch.int64, device=device),
        )
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
        try:
            # A size is at least 2 for the tracer, unless it is told that one token may come, too.
            with fx_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                self._compiled(*inputs)
        except torch._dynamo.exc.Unsupported as error:
            raise ModelError(f"the model cannot be traced as one graph: {error}") from error
        except torch.fx.experimental.symbolic_shapes.ConstraintViolationError as error:
            raise ModelError(
                "the model's code ties the number of tokens to a constant, but it has to run at "
                f"every number: {error}"
            ) from error
        self._bind(inputs)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's forward: `[num_tokens]` each, to `[num_tokens, hidden_size]`."""
        if self.strict:
            return self._call_strictly(input_ids, positions)
        arguments = self._arguments.copy()
        for index in self._size_inputs:
            arguments[index] = input_ids.shape[0]
        for index, which in self._token_inputs:
            arguments[index] = positions if which else input_ids
        return self._run(*arguments)[0]

    def _call_strictly(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                return self._compiled(input_ids, positions)
        except RuntimeError as error:
            if "fail_on_recompile" not in str(error):
                raise
            raise ModelError(
                f"the model branches on the number of tokens: a step of {input_ids.shape[0]} takes "
                f"another side than the trace: {error}"
            ) from error

    @property
    def _run(self) -> Callable[..., Any]:
        assert self.backend.stitched is not None
        return self.backend.stitched.forward

    def _bind(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Notes which of the graph's inputs change from call to call; the others are parameters."""
        self._arguments = list(self.backend.example_inputs)
        for index, value in enumerate(self._arguments):
            if isinstance(value, torch.Tensor):
                for which, tensor in enumerate(inputs):
                    if value is tensor:
                        self._token_inputs.append((index, which))
            else:
                self._size_inputs.append(index)


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a method that Dynamo does not know yet.

    Dynamo keeps what it has traced with a function's code object, which all models of a class
    share, and gives up after eight: the ninth engine of a process would not be compiled.
    """
    function = forward.__func__  # type: ignore[attr-defined]
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return types.MethodType(copy, forward.__self__)  # type: ignore[attr-defined]


def _no_guards(guards: list[Any]) -> list[bool]:
    return [False] * len(guards)


def _only_shapes(guards: list[Any]) -> list[bool]:
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]

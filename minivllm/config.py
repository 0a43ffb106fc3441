"""Every choice the engine makes, checked before anything is allocated.

`EngineConfig` is built once, from a user's keyword arguments, and `ModelConfig` from the model's
own `config.json`. Both are frozen afterwards: nothing in the engine changes its mind at step 400.
Each check names the field, the value it got, and what to do about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm.errors import ConfigError, ModelError

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")
DEVICES: tuple[str, ...] = ("auto", "cpu", "cuda")
# Every buffer of a step is allocated at its largest size, and block ids are 32-bit numbers.
_MAX_TOKENS_PER_STEP = 2**20
_MAX_SEQS = 2**16
_MAX_BLOCKS = 2**31 - 2
COMPILERS: tuple[str, ...] = ("auto", "none", "eager", "inductor")
FUSION_NAMES: tuple[str, ...] = ("add_rms_norm", "silu_mul", "qk_norm_rope")
ATTENTION_BACKENDS: tuple[str, ...] = ("auto", "torch", "triton")


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3's stretch of the rotary frequencies (Llama 3 report, 2024, section 3.2).

    Wavelengths under `original_max_position_embeddings / high_freq_factor` tokens stay as they are,
    those over `original_max_position_embeddings / low_freq_factor` are divided by `factor`, and
    those between are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder of the Llama family; the names are Hugging Face's.

    Attributes:
        architecture: Hugging Face's class name, such as `LlamaForCausalLM`.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; each serves `num_attention_heads //
            num_key_value_heads` query heads (grouped-query attention).
        head_dim: Width of one head.
        max_position_embeddings: Longest sequence the model was made for, in tokens.
        rms_norm_eps: Added to the mean square under the root.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: Llama-3's scaling, or None for the plain frequencies.
        tie_word_embeddings: The output projection is the embedding itself.
        attention_bias: Query, key and value projections have a bias (Qwen2).
        attention_out_bias: The attention's output projection has one too.
        mlp_bias: The MLP's projections have a bias.
        qk_norm: Queries and keys pass an RMSNorm per head before the rotation (Qwen3).
        eos_token_ids: Tokens that end a sequence.
        bos_token_id: Token that starts one, if the model has it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"model config: {name}={value!r} must be a positive integer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"model config: num_attention_heads={self.num_attention_heads} is not a multiple "
                f"of num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(
                f"model config: head_dim={self.head_dim} must be even for rotary embeddings"
            )

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: Tokens per block.
        num_kv_blocks: Blocks in the pool; None sizes the pool from the memory at hand.
        gpu_memory_utilization: Fraction of the GPU's memory that weights, activations and the
            pool may take together.
        enable_prefix_caching: Reuse blocks whose tokens, and all tokens before them, are the same.
    """

    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        size = self.block_size
        if not isinstance(size, int) or size < 1 or size > 256 or size & (size - 1):
            raise ConfigError(
                f"block_size={size!r}: expected a power of two from 1 to 256 (16 is a good choice)"
            )
        if self.num_kv_blocks is not None:
            _positive("num_kv_blocks", self.num_kv_blocks, _MAX_BLOCKS)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r}: expected "
                "a fraction in (0, 1]"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of one step.

    Attributes:
        max_num_batched_tokens: Token budget of a step, over all requests.
        max_num_seqs: Most requests that run at the same time.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        _positive("max_num_batched_tokens", self.max_num_batched_tokens, _MAX_TOKENS_PER_STEP)
        _positive("max_num_seqs", self.max_num_seqs, _MAX_SEQS)


@dataclass(frozen=True)
class CompilationConfig:
    """What is compiled, and how. To find a fault, go down the ladder: `inductor`, `eager`, `none`.

    Attributes:
        compile: `none` runs the model as it is written; `eager` traces and splits it, and runs the
            pieces as they are; `inductor` compiles them; `auto` is inductor on a GPU and none on a
            CPU, where compiling takes longer than most programs run.
        compile_sizes: Numbers of tokens to compile for exactly, beside the general shape.
        compile_sizes_at_start: Compile for those numbers when the engine is built, rather than in
            the first step that has one.
        splitting_ops: Operations at which the model is split; they are not compiled.
        strict: Keep guards on shapes: a model that branches on the number of tokens fails instead
            of silently keeping the branch it was traced on.
        compile_cache: Keep compiled pieces on disk for the next start.
        fusions: Chains of operations that Inductor is given as one: `add_rms_norm`, `silu_mul`,
            `qk_norm_rope`. It fuses them by itself, so none is on by default.
        enforce_eager: The same as `compile="none"`, under vLLM's name.
    """

    compile: str = "auto"
    compile_sizes: tuple[int, ...] = ()
    compile_sizes_at_start: bool = False
    splitting_ops: tuple[str, ...] = ("minivllm::attention_with_output",)
    strict: bool = False
    compile_cache: bool = True
    fusions: tuple[str, ...] = ()
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        _one_of("compile", self.compile, COMPILERS)
        object.__setattr__(self, "compile_sizes", tuple(self.compile_sizes))
        object.__setattr__(self, "splitting_ops", tuple(self.splitting_ops))
        object.__setattr__(self, "fusions", tuple(self.fusions))
        for size in self.compile_sizes:
            _positive("compile_sizes", size)
        for name in self.fusions:
            _one_of("fusions", name, FUSION_NAMES)
        if not self.splitting_ops:
            raise ConfigError(
                "splitting_ops=(): attention cannot be compiled, so its operation must be one; "
                "leave the default"
            )
        if self.enforce_eager and self.compile not in ("auto", "none"):
            raise ConfigError(
                f"enforce_eager=True contradicts compile={self.compile!r}; give one of the two"
            )
        if self.compile_sizes_at_start and not self.compile_sizes:
            raise ConfigError(
                "compile_sizes_at_start=True has no effect without sizes; give compile_sizes"
            )
        if self.fusions and (self.enforce_eager or self.compile in ("none", "eager")):
            raise ConfigError(
                f"fusions={self.fusions!r} are passes of Inductor's; choose compile='inductor', or "
                "remove them"
            )
        off = self.enforce_eager or self.compile == "none"
        if off and (self.compile_sizes or self.strict):
            raise ConfigError(
                "compile_sizes and strict have no effect when nothing is compiled; remove them, "
                "or choose compile='inductor'"
            )


@dataclass(frozen=True)
class EngineConfig:
    """All of it. Built by `EngineConfig.from_options`; every field is final.

    Attributes:
        model: What the user named: alias, folder, file, hub name or `random:<preset>`.
        device: `cpu`, `cuda`, or `auto`: cuda where there is one.
        dtype: Of weights, activations and KV cache: `float32`, `bfloat16`, `float16`, or `auto`:
            float32 on a CPU, bfloat16 on a GPU.
        attention_backend: `torch`, `triton`, or `auto`: triton on a GPU.
        max_model_len: Longest sequence (prompt and output) in tokens; None is as long as model and
            KV pool allow.
        seed: Of random weights, and of requests that bring no seed of their own.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.max_model_len is not None:
            _positive("max_model_len", self.max_model_len)
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed!r}: expected an integer in [0, 2**63)")

    @classmethod
    def from_options(cls, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """Builds the configuration from flat keyword arguments, as `LLM` takes them.

        Args:
            model: The model's name.
            options: Values by field name, of `EngineConfig` or of one of its parts.

        Raises:
            ConfigError: An option is unknown, impossible, or cannot work on this machine.
        """
        classes: dict[str, Any] = {
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "compilation": CompilationConfig,
        }
        owners = {name: "" for name in cls.__dataclass_fields__ if name not in ("model", *classes)}
        for part, part_class in classes.items():
            owners |= dict.fromkeys(part_class.__dataclass_fields__, part)
        values: dict[str, dict[str, Any]] = {part: {} for part in ("", *classes)}
        for name, value in options.items():
            if name not in owners:
                raise ConfigError(
                    f"unknown option {name!r}; the options are: {', '.join(sorted(owners))}"
                )
            values[owners[name]][name] = value
        parts = {part: part_class(**values[part]) for part, part_class in classes.items()}
        config = cls(model=model, **values[""], **parts)
        return config.resolved()

    def resolved(self) -> EngineConfig:
        """Replaces every `auto` by what this machine can do.

        Raises:
            ConfigError: The device was asked for by name and is not there, or the backend cannot
                run on it.
        """
        from minivllm.platform import has_cuda, has_triton

        device = self.device
        if device == "auto":
            device = "cuda" if has_cuda() else "cpu"
        if device == "cuda" and not has_cuda():
            raise ConfigError(
                "device='cuda': torch sees no CUDA device; use device='cpu', or "
                "install a CUDA build of torch and check with 'minivllm doctor'"
            )
        backend = self.attention_backend
        if backend == "auto":
            backend = "triton" if device == "cuda" and has_triton() else "torch"
        if backend == "triton" and not has_triton(device):
            raise ConfigError(
                f"attention_backend='triton' cannot run on device={device!r}: it needs the triton "
                "package and a GPU (or TRITON_INTERPRET=1 to run slowly on a CPU); "
                "use attention_backend='torch'"
            )
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device == "cuda" else "float32"
        return dataclasses.replace(
            self,
            device=device,
            dtype=dtype,
            attention_backend=backend,
            compilation=self._resolved_compilation(device),
        )

    def _resolved_compilation(self, device: str) -> CompilationConfig:
        compilation, limit = self.compilation, self.scheduler.max_num_batched_tokens
        for size in compilation.compile_sizes:
            if size > limit:
                raise ConfigError(
                    f"compile_sizes: no step has {size} tokens, as max_num_batched_tokens={limit}"
                )
        compile = compilation.compile
        if compilation.enforce_eager:
            compile = "none"
        elif compile == "auto":
            # These only make sense for a compiled model: asking for them asks for it.
            chosen = compilation.compile_sizes, compilation.strict, compilation.fusions
            wanted = device == "cuda" or any(chosen)
            compile = "inductor" if wanted else "none"
        return dataclasses.replace(compilation, compile=compile)


def _positive(name: str, value: object, limit: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a positive integer")
    if limit is not None and value > limit:
        raise ConfigError(f"{name}={value!r}: expected at most {limit:,}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(choices)}")

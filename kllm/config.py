"""How an engine is set up: frozen dataclasses that check themselves."""

from dataclasses import dataclass, field
from typing import Literal

from kllm.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
CP_KINDS = ("auto", "ring", "all_gather", "replicated")
EP_BACKENDS = ("auto", "all_to_all", "all_gather", "deep_ep")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8")
FIDELITIES = ("real", "rank-slice")  # of a run
MOST_RANKS = 4096  # of a layout; more is a slip of the keys, and would only be slow to refuse


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How KV-cache memory is laid out."""

    page_size: int = 0  # tokens a page; 0: the smallest that suits the model and the backend
    memory_bytes: int = 0  # bytes for KV pages and request state; 0: by memory_fraction
    memory_fraction: float = 0.85  # share of free device memory given to KV when bytes are not said
    dtype: str = "auto"  # KV element type; auto: the model dtype
    rewind_tokens: int = 0  # how many of the newest tokens speculation may take back

    def __post_init__(self) -> None:
        _at_least("page_size", self.page_size, 0)
        _at_least("memory_bytes", self.memory_bytes, 0)
        _at_least("rewind_tokens", self.rewind_tokens, 0)
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")
        if self.dtype not in KV_DTYPES:
            raise ConfigError(f"unknown KV dtype '{self.dtype}'; known: {', '.join(KV_DTYPES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold."""

    max_batch: int = 64  # running requests
    token_budget: int = 2048  # tokens a step; longer prompts are prefilled in chunks of this

    def __post_init__(self) -> None:
        _at_least("max_batch", self.max_batch, 1)
        _at_least("token_budget", self.token_budget, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The parallel layout: degrees, and how what they need is exchanged.

    Degrees of 1 everywhere are a single rank. Experts live on the ranks of a pipeline stage:
    with ep = 1 each expert is split over the tp ranks, otherwise whole experts are spread over
    ep ranks.
    """

    tp: int = 1  # tensor parallel: heads, columns, vocabulary
    dp: int = 1  # request-DP attention
    ep: int = 1  # expert parallel
    cp: int = 1  # context parallel prefill; each request decodes on one of the ranks
    pp: int = 1  # pipeline stages
    # How prefill sees the KV of other cp ranks: it travels round them (ring), each layer's is
    # gathered (all_gather), or all of them keep all of it (replicated). auto: the faster of the
    # first two, which take no more KV memory than the prompt.
    cp_kind: str = "auto"
    ep_backend: str = "auto"  # dispatch and combine; auto: by what a step's shape allows
    redundant_experts: int = 0  # second and further copies, of all experts of a layer together

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep", "cp", "pp"):
            _at_least(name, getattr(self, name), 1)
        if self.world > MOST_RANKS:
            raise ConfigError(
                f"the layout has {self.world} ranks and kLLM takes at most {MOST_RANKS}; lower its "
                "degrees"
            )
        for name, known in (("cp_kind", CP_KINDS), ("ep_backend", EP_BACKENDS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"unknown {name} '{getattr(self, name)}'; known: {', '.join(known)}"
                )
        stage = self.tp * self.dp * self.cp
        if self.ep > 1 and (self.ep % self.tp or stage % self.ep):
            raise ConfigError(
                f"ep {self.ep} does not suit tp {self.tp}, dp {self.dp} and cp {self.cp}: whole "
                f"experts need an ep that is a multiple of tp and divides tp * dp * cp = {stage}"
            )
        _at_least("redundant_experts", self.redundant_experts, 0)
        if self.redundant_experts and self.ep == 1:
            raise ConfigError(
                f"{self.redundant_experts} redundant experts need ranks to lie on, and ep is 1; "
                "raise ep, or leave redundant_experts at 0"
            )

    @property
    def world(self) -> int:
        """Ranks of the layout; experts live on the attention ranks."""
        return self.tp * self.dp * self.cp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: str  # preset name, model folder, or GGUF file
    scale: str = "auto"  # "full", "layers:N", "tiny"; auto: the largest that fits the device
    load: Literal["auto", "weights", "random"] = "auto"  # auto: weights if model is a file
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto: the GPU if there is one
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    attention: str = "auto"  # attention backend for full-KV families
    graphs: bool = True  # replay decode steps as CUDA graphs, where there is a GPU
    max_model_len: int = 0  # tokens a request may hold; 0: what model and KV pool allow
    seed: int = 0  # random weights, and requests without a seed of their own
    fidelity: Literal["real", "rank-slice"] = "real"  # whether all ranks of the layout run
    link: str = "nvlink4"  # of a rank-slice: a preset's name or LATENCY_S:BYTES_PER_S
    slice_rank: int = 0  # which rank a rank-slice runs
    # Result of `kllm bench expert-balance` by whose routing experts are placed; empty: in order.
    expert_placement: str = ""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("no model named; see `kllm models` for the presets")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype '{self.dtype}'; known: auto, {', '.join(DTYPES)}")
        if self.fidelity not in FIDELITIES:
            known = ", ".join(FIDELITIES)
            raise ConfigError(f"unknown fidelity '{self.fidelity}'; known: {known}")
        if not 0 <= self.slice_rank < self.parallel.world:
            raise ConfigError(
                f"slice_rank {self.slice_rank} is not a rank of a layout of {self.parallel.world}"
            )
        if self.load not in ("auto", "weights", "random"):
            raise ConfigError(f"unknown load '{self.load}'; known: auto, weights, random")
        if self.expert_placement and self.parallel.ep == 1:
            raise ConfigError(
                f"expert_placement {self.expert_placement} has no ranks to place experts on: ep "
                "is 1; raise ep in the layout, or leave it out"
            )
        _at_least("max_model_len", self.max_model_len, 0)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be at least 0 and below 2^63, got {self.seed}")

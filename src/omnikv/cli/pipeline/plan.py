"""What a pipeline is to do, checked before anything starts, and what each of its ranks is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from omnikv.core.keys import PRIMARY_ROLE, Edge
from omnikv.core.reshard import Route, split_heads
from omnikv.core.sharing import roles_of_guidance_ranks
from omnikv.errors import ConfigError

Stage = Literal["ar", "dit", "reference"]
Fault = Literal["none", "late", "missing", "failed", "kill-ar", "kill-dit", "slow-replica"]
FAULTS: tuple[str, ...] = get_args(Fault)
BRANCHES = (PRIMARY_ROLE, "cfg_text", "cfg_img")
# The companion that comes late, never, or as a failure.
FAULTY_ROLE = "cfg_text"
NUM_HEADS, NUM_KV_HEADS, NUM_LATENTS = 8, 4, 256
LONGEST_TIMEOUT_S = 86400.0
_MOST_PROCESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """What was asked for on the command line: the parallel sizes of both stages, and what is to go wrong.

    `fault_rank` is the rank of the autoregressive stage that is faulty, or of the receiving stage with "kill-dit".

    Raises:
        ConfigError: a number is out of range, or they do not go together.
    """

    prompt: str
    ar_tp: int = 2
    dit_tp: int = 2
    cfg: int = 3
    sp: int = 1
    replicas: int = 1
    steps: int = 8
    shared_prefix: bool = False
    fault: Fault = "none"
    fault_rank: int = 0
    seed: int = 7
    timeout_s: float = 170.0

    def __post_init__(self) -> None:
        if not self.prompt.strip() or any("\ud800" <= char <= "\udfff" for char in self.prompt):
            raise ConfigError(f"--prompt must be a text in UTF-8, got {self.prompt!a}")
        counts = {"--steps": self.steps, "--replicas": self.replicas, "--sp": self.sp, "--cfg": self.cfg}
        for option, number in counts.items():
            if number < 1:
                raise ConfigError(f"{option} must be at least 1, got {number}")
        for option, tp in (("--ar-tp", self.ar_tp), ("--dit-tp", self.dit_tp)):
            if tp < 1 or NUM_KV_HEADS % tp:
                raise ConfigError(f"{option} must divide the model's {NUM_KV_HEADS} KV heads, got {tp}")
        if NUM_LATENTS % self.sp:
            raise ConfigError(f"--sp must divide the picture's {NUM_LATENTS} latents, got {self.sp}")
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            raise ConfigError(f"--timeout-s must be above 0 and at most {LONGEST_TIMEOUT_S:.0f}, got {self.timeout_s}")
        if self.ar_tp + self.num_receiving > _MOST_PROCESSES:
            raise ConfigError(f"{self.ar_tp + self.num_receiving} processes are more than {_MOST_PROCESSES}")
        roles_of_guidance_ranks(self.roles, self.cfg)
        self._require_possible_fault()

    def _require_possible_fault(self) -> None:
        if self.fault not in FAULTS:
            raise ConfigError(f"--fault must be one of {', '.join(FAULTS)}, got {self.fault!r}")
        if self.fault in ("kill-dit", "slow-replica") and self.replicas < 2:
            raise ConfigError(f"--fault {self.fault} shows what another replica makes of it: it needs --replicas 2")
        if self.fault in ("late", "missing", "failed") and self.shared_prefix:
            raise ConfigError(f"--fault {self.fault} is about a companion, and --shared-prefix sends none")
        size = self.replica_size if self.fault == "kill-dit" else self.ar_tp
        if not 0 <= self.fault_rank < size:
            raise ConfigError(f"--fault-rank {self.fault_rank} is no rank: there are {size}, 0 to {size - 1}")

    @property
    def branches(self) -> tuple[str, ...]:
        """The guidance branches of a picture: two of them where a group of two runs them, or one cache serves them."""
        return BRANCHES[:2] if self.cfg == 2 or (self.shared_prefix and self.cfg == 1) else BRANCHES

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles under which the caches of a picture are sent."""
        return (PRIMARY_ROLE,) if self.shared_prefix else self.branches

    @property
    def replica_size(self) -> int:
        return self.cfg * self.sp * self.dit_tp

    @property
    def num_receiving(self) -> int:
        return self.replicas * self.replica_size

    @property
    def mix(self) -> str:
        """The sizes in words, those of 1 left out."""
        sizes = (("CFG", self.cfg), ("SP", self.sp), ("replicas", self.replicas))
        receiving = [f"TP {self.dit_tp}", *(f"{name} {size}" for name, size in sizes if size > 1)]
        shared = ", one cache for all branches" if self.shared_prefix else ""
        return f"TP {self.ar_tp} -> {' x '.join(receiving)}{shared}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageJob:
    """All that one rank's process is told.

    `folder` is where the ranks of a stage meet and where the reference leaves its latents.
    """

    stage: Stage
    rank: int
    request: PipelineRequest
    namespace: str
    folder: str
    receive_timeout_s: float

    @property
    def title(self) -> str:
        return self.stage if self.stage == "reference" else f"{self.stage} rank {self.rank}"

    @property
    def program(self) -> str:
        return f"omnikv.cli.pipeline.{self.stage}_rank"

    @property
    def last_event(self) -> str:
        return "left"

    def route(self, replica: int) -> Route:
        """The route to the readers of a replica: one target rank a tensor-parallel place."""
        return Route(
            edge=Edge(from_stage="ar", to_stage="dit", namespace=self.namespace, replica=replica),
            source_heads=split_heads(NUM_KV_HEADS, self.request.ar_tp),
            target_heads=split_heads(NUM_KV_HEADS, self.request.dit_tp),
        )

    def to_message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> StageJob:
        return cls(**{**message, "request": PipelineRequest(**message["request"])})


def request_id(number: int) -> str:
    """The id of the picture `number` of a run."""
    return f"picture-{number}"


def picture_prompt(request: PipelineRequest, number: int) -> str:
    """What the picture `number` is drawn from; each replica draws another one."""
    return request.prompt if number == 0 else f"{request.prompt} ({number + 1})"
